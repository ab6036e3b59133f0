"""Names that PyTorch, Lightning and Hugging Face have for options, and the names here.

Someone who types a name of another trainer gets the name that is meant, as an argument of Python or
as a key of a config. docs/trainers.md has the same as a table, with the differences in meaning.
"""

from typing import NamedTuple


class Option(NamedTuple):
    """An option, and the names that others have for it.

    Attributes:
      key: Key of a config; empty for none.
      home: "DataParallel" or "fit", which takes it in Python; empty for neither.
      argument: Name of the argument there, or the object that replaces it.
      names: Names elsewhere, separated by spaces.
    """

    key: str
    home: str
    argument: str
    names: str

    def seen_from(self, home: str) -> str:
        """The argument, as it is written for someone who calls `home`."""
        return self.argument if self.home in (home, "") else f"{self.home}({self.argument}=)"


_STEP, _FIT = "DataParallel", "fit"
OPTIONS = (
    Option("train.num_steps", _FIT, "num_steps", "max_steps total_steps num_training_steps"),
    Option("train.num_epochs", _FIT, "num_epochs", "max_epochs num_train_epochs epochs n_epochs"),
    Option(
        "data.global_batch_size",
        _FIT,
        "global_batch_size",
        "batch_size train_batch_size per_device_train_batch_size",
    ),
    Option(
        "ddp.accumulate_steps",
        _STEP,
        "accumulate_steps",
        "gradient_accumulation_steps accumulate_grad_batches grad_accum_steps",
    ),
    Option(
        "ddp.max_grad_norm",
        _STEP,
        "max_grad_norm",
        "gradient_clip_val gradient_clip clip_grad_norm clip_grad grad_clip max_norm",
    ),
    Option(
        "ddp.compute_dtype",
        _STEP,
        "compute_dtype",
        "precision mixed_precision bf16 fp16 half_precision autocast amp",
    ),
    Option("ddp.loss_scale", _STEP, "loss_scale", "grad_scaler dynamic_loss_scale"),
    Option("optimizer.learning_rate", "", "", "lr"),
    Option("optimizer.schedule.name", "", "", "lr_scheduler lr_scheduler_type scheduler"),
    Option("optimizer.warmup_steps", "", "", "num_warmup_steps"),
    Option("train.log_every_steps", _FIT, "log_every_steps", "logging_steps log_every_n_steps"),
    Option(
        "train.eval_every_steps",
        _FIT,
        "eval_every_steps",
        "eval_steps val_check_interval eval_interval",
    ),
    Option("", _FIT, "evaluate", "eval_dataset val_dataloaders val_loader validation_data"),
    Option("run.dir", _FIT, "run_dir", "output_dir default_root_dir log_dir save_dir workdir"),
    Option(
        "checkpoint.every_steps",
        _FIT,
        "save_every_steps",
        "save_steps every_n_train_steps save_interval",
    ),
    Option("checkpoint.keep", _FIT, "keep", "save_total_limit save_top_k max_to_keep"),
    Option("checkpoint.best_metric", "", "jddp.KeepBest", "metric_for_best_model monitor"),
    Option("checkpoint.best_mode", "", "", "greater_is_better"),
    Option(
        "train.stop.metric",
        "",
        "jddp.EarlyStopping",
        "early_stopping early_stop early_stopping_metric",
    ),
    Option("train.stop.patience", "", "jddp.EarlyStopping", "patience early_stopping_patience"),
    Option("train.stop.min_delta", "", "", "early_stopping_threshold min_delta"),
    Option("loss.eval_target", _STEP, "eval_fn", "compute_metrics eval_fn"),
    Option("checkpoint.resume", _FIT, "resume", "resume_from_checkpoint ckpt_path"),
    Option("", _FIT, "callbacks", "logger loggers report_to"),
    Option("data.num_workers", "", "", "dataloader_num_workers workers"),
    Option("seed", _FIT, "seed", "random_seed seed_everything"),
    Option("ddp.batch_norm", _STEP, "batch_norm", "sync_batchnorm sync_bn broadcast_buffers"),
    Option(
        "ddp.unused_parameters",
        _STEP,
        "unused_parameters",
        "find_unused_parameters ddp_find_unused_parameters",
    ),
    Option("ddp.bucket_mb", _STEP, "bucket_mb", "bucket_cap_mb"),
    Option("ddp.shard_optimizer", _STEP, "shard_optimizer", "zero zero_stage zero1"),
    Option("ddp.ema_decay", _STEP, "ema_decay", "ema model_ema"),
    Option(
        "mesh.num_devices",
        _STEP,
        "mesh",
        "devices gpus num_gpus n_gpu device_ids process_group nproc_per_node",
    ),
)
KEYS = {name: option.key for option in OPTIONS if option.key for name in option.names.split()}


def _arguments(home: str) -> dict[str, str]:
    """The arguments that are meant, by names of others, for someone who calls `home`.

    An argument of `fit` that is given to `DataParallel`, or the reverse, is among the names.
    """
    meant = dict[str, str]()
    for option in OPTIONS:
        if option.argument:
            names = [option.argument, *option.names.split()]
            meant |= dict.fromkeys(names, option.seen_from(home))
    return meant


OF_DATA_PARALLEL = _arguments("DataParallel")
OF_FIT = _arguments("fit")
OF_BATCHES = {name: x for name, x in OF_FIT.items() if x == "global_batch_size"}

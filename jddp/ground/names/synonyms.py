"""Names that PyTorch, Lightning and Hugging Face have for options, and the names here.

Someone who types a name of another trainer gets the name that is meant, as an argument of Python or
as a key of a config. docs/trainers.md has the same as a table, with the differences in meaning.
"""

from typing import NamedTuple

# Each row: an argument in Python (of `fit`, of `DataParallel`, or an object of jddp), a key of a
# config, and names elsewhere. A dash stands for none.
_TABLE = """
fit.num_steps          train.num_steps         max_steps total_steps num_training_steps
fit.num_epochs         train.num_epochs        max_epochs num_train_epochs epochs n_epochs
fit.global_batch_size  data.global_batch_size  batch_size train_batch_size
fit.global_batch_size  data.global_batch_size  per_device_train_batch_size
accumulate_steps       ddp.accumulate_steps    gradient_accumulation_steps accumulate_grad_batches
accumulate_steps       ddp.accumulate_steps    grad_accum_steps
max_grad_norm          ddp.max_grad_norm       gradient_clip_val gradient_clip clip_grad_norm
max_grad_norm          ddp.max_grad_norm       clip_grad grad_clip max_norm
precision              ddp.precision           mixed_precision bf16 fp16 half_precision autocast amp
precision              ddp.precision           compute_dtype precision
precision              ddp.precision.loss_scale loss_scale grad_scaler dynamic_loss_scale
-                      optimizer.learning_rate lr
-                      optimizer.schedule.name lr_scheduler lr_scheduler_type scheduler
-                      optimizer.warmup_steps  num_warmup_steps
fit.log_every_steps    train.log_every_steps   logging_steps log_every_n_steps
fit.eval_every_steps   train.eval_every_steps  eval_steps val_check_interval eval_interval
fit.eval_every_steps   train.eval_every_epochs eval_strategy check_val_every_n_epoch
fit.log_every_steps    -                       logging_strategy
fit.save_every_steps   checkpoint.every_epochs save_strategy every_n_epochs
fit.evaluate           -                       eval_dataset val_dataloaders val_loader
fit.evaluate           -                       validation_data
fit.run_dir            run.dir                 output_dir default_root_dir log_dir save_dir
fit.run_dir            run.dir                 workdir
fit.save_every_steps   checkpoint.every_steps  save_steps every_n_train_steps save_interval
fit.keep               checkpoint.keep         save_total_limit max_to_keep
jddp.KeepBest          checkpoint.best_metric  metric_for_best_model monitor
jddp.KeepBest          callbacks               save_top_k keep_best greater_is_better best_mode
jddp.EarlyStopping     callbacks               early_stopping early_stop early_stopping_metric stop
jddp.EarlyStopping     callbacks               patience early_stopping_patience
-                      callbacks               early_stopping_threshold min_delta
eval_fn                loss.eval_target        compute_metrics eval_fn
fit.resume             checkpoint.resume       resume_from_checkpoint ckpt_path
jddp.Keep              checkpoint.keep_every_steps keep_every_steps
jddp.Evaluation        train.eval_params       eval_params
jddp.Evaluation        train.limit_eval_batches limit_val_batches limit_eval_batches
jddp.Checks            train.max_consecutive_skips max_consecutive_skips
jddp.Checks            train.check_replicas_every_steps check_replicas_every_steps
jddp.Checks            train.replay_every_steps replay_every_steps
jddp.Checks            train.on_spike          on_spike spike_detection
jddp.Checks            -                       same_batches limits
fit.batches            -                       data train_dataset train_dataloader train_dataloaders
fit.sinks              report.sinks            logger loggers report_to log_with
-                      data.num_workers        dataloader_num_workers workers
fit.seed               seed                    random_seed seed_everything
batch_norm             ddp.batch_norm          sync_batchnorm sync_bn broadcast_buffers
unused_parameters      ddp.unused_parameters   find_unused_parameters ddp_find_unused_parameters
reduction              ddp.reduction.bucket_mb bucket_cap_mb bucket_mb
reduction              ddp.reduction           wire_dtype layout overlap comm_hook
strategy               ddp.strategy            zero zero_stage zero1 shard_optimizer fsdp
ema_decay              ddp.ema_decay           ema model_ema
mesh                   mesh.num_devices        devices gpus num_gpus n_gpu device_ids
mesh                   mesh.num_devices        process_group nproc_per_node
"""


class Option(NamedTuple):
    """An option, and the names that others have for it.

    Attributes:
      argument: Argument of `DataParallel`, "fit." and one of `fit`, or an object that replaces it;
        empty for none.
      key: Key of a config; empty for none.
      names: Names elsewhere.
    """

    argument: str
    key: str
    names: list[str]


_ROWS = [row.split() for row in _TABLE.strip().splitlines()]
OPTIONS = [Option(argument.strip("-"), key.strip("-"), names) for argument, key, *names in _ROWS]
KEYS = {name: option.key for option in OPTIONS if option.key for name in option.names}


def _arguments(home: str) -> dict[str, str]:
    """The arguments by the names that others have for them, for someone who calls `home`.

    An argument of `fit` that is given to `DataParallel`, or the reverse, is among the names.
    """
    meant = dict[str, str]()
    for option in OPTIONS:
        owner, _, name = option.argument.rpartition(".")
        if not name:
            continue
        owner = owner or "DataParallel"
        shown = {"jddp": f"jddp.{name}", home: name}.get(owner, f"{owner}({name}=)")
        meant |= dict.fromkeys([name, *option.names], shown)
    return meant


# Options of PyTorch's DataLoader.
_UNSHUFFLED = "TrainBatches(order=jddp.data.Order(num_examples, seed, shuffle=False))"
OF_LOADERS = {"shuffle": _UNSHUFFLED, "drop_last": "TrainBatches(drop_remainder=)"}
OF_DATA_PARALLEL = _arguments("DataParallel")
OF_FIT = _arguments("fit") | OF_LOADERS
OF_EVAL_BATCHES = {name: x for name, x in OF_FIT.items() if x == "global_batch_size"}
OF_BATCHES = OF_EVAL_BATCHES | OF_LOADERS

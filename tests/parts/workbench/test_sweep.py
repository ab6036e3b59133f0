"""A sweep is the product of values, whose points have names of directories."""

import pytest

from jddp.errors import ConfigError
from jddp.workbench.sweep import Sweep


def names_of(*words):
    return [point.name for point in Sweep.parse(words).points()]


def test_points_are_the_product_named_by_the_keys_that_vary():
    sweep = Sweep.parse(["seed=0,1", "optimizer.learning_rate=1e-3,3e-3", "train.num_steps=20"])
    points = [*sweep.points()]
    assert sweep.num_points == len(points) == 4
    assert [point.name for point in points] == [
        "seed=0,learning_rate=1e-3",
        "seed=0,learning_rate=3e-3",
        "seed=1,learning_rate=1e-3",
        "seed=1,learning_rate=3e-3",
    ]
    assert points[1].overrides == ("seed=0", "optimizer.learning_rate=3e-3", "train.num_steps=20")


def test_a_comma_in_brackets_or_quotes_is_a_part_of_a_value():
    (values,) = Sweep.parse(["train.profile_steps=[1,2],[3,4],'a,b',my:A"]).values.values()
    assert values == ("[1,2]", "[3,4]", "'a,b'", "my:A")


def test_each_value_occurs_in_a_sample_without_the_product():
    sweep = Sweep.parse(["a=1,2,3", "b=4,5", "c=6"])
    assert [point.overrides for point in sweep.samples()] == [
        ("a=1", "b=4", "c=6"),
        ("a=2", "b=4", "c=6"),
        ("a=3", "b=4", "c=6"),
        ("a=1", "b=5", "c=6"),
    ]
    huge = Sweep.parse([f"{key}={','.join(map(str, range(1000)))}" for key in "abcd"])
    assert huge.num_points == 10**12
    assert len([*huge.samples()]) == 3997


def test_names_are_short_different_and_those_of_files():
    assert names_of("a.x=1,2", "b.x=3")[0] == "a.x=1"
    assert names_of("seed=1,1,2") == ["seed=1", "seed=2"]
    assert names_of("seed=1") == ["run"]
    paths = names_of(f"data.dir=/data/one,/data_one,{'long' * 50},{'long' * 51},../up")
    assert len(set(paths)) == 5
    assert not [name for name in paths if "/" in name or len(name) > 60]


@pytest.mark.parametrize("word", ["seed", "seed=", "=1", "seed=1,,2", "seed=[1", "seed=1]", "x=}"])
def test_words_of_another_form_are_refused_in_one_line(word):
    with pytest.raises(ConfigError, match="not of the form key.path=value,value"):
        Sweep.parse([word])


def test_the_folder_of_the_runs_is_not_varied():
    assert Sweep.parse(["seed=1,2", "run.dir=runs/a"]).num_points == 2
    with pytest.raises(ConfigError, match="run.dir: it is the folder of all runs"):
        Sweep.parse(["run.dir=a,b"])

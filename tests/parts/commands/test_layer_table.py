from jddp.commands.layers import layer_table

BLOCK = {"dense/bias": (8,), "dense/kernel": (4, 8), "scale": ()}
SHAPES = {f"block_{number}/{name}": x for number in (0, 1, 10) for name, x in BLOCK.items()}


def test_layers_are_listed_with_their_arrays_and_equal_blocks_share_a_line():
    table = layer_table({**SHAPES, "block_11/dense/kernel": (4, 9), "positions": (7, 4)})
    assert table == [
        "layer              parameters  arrays",
        "3 x block_*/dense         120  bias 8, kernel 4x8",
        "3 x block_*                 3  scale 1",
        "block_11/dense             36  kernel 4x9",
        "positions                  28  positions 7x4",
        "sum                       187",
    ]


def test_layers_of_one_block_are_told_apart():
    table = layer_table({f"block_{i}/norm_{j}/bias": (2,) for i in range(4) for j in range(2)})
    assert table[1:-1] == [
        "4 x block_*/norm_0           8  bias 2",
        "4 x block_*/norm_1           8  bias 2",
    ]


def test_many_arrays_of_a_layer_take_several_lines():
    names = [f"weight_of_expert_{number}" for number in range(4)]
    table = layer_table({f"router/{name}": (1024, 4096) for name in names})
    assert all(len(line) <= 80 for line in table)
    assert "".join(table).count("1024x4096") == 4
    assert table[2].startswith(" " * 20 + "weight_of_expert")

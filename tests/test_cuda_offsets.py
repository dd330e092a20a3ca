"""Boundaries of one group on a GPU: a row of a table, made once."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_nvfp4.quant import layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU"),
]
ROWS = (0, 1, 300, 65535, 65536, 1 << 20)


@pytest.fixture(autouse=True)
def no_tables(monkeypatch):
    monkeypatch.setattr(layout, "_tables", {})


def test_values_within_and_behind_the_table():
    # Prevents: the last row's neighbour read, or a table that ends a row early.
    for num_rows in ROWS:
        assert layout.dense_offsets(num_rows, "cuda").tolist() == [0, num_rows]
        assert layout.dense_offsets(num_rows, "cpu").tolist() == [0, num_rows]


def test_no_launch_for_few_rows():
    # Prevents: a launch before every small product.
    first, second = (layout.dense_offsets(5, torch.device("cuda")) for _ in range(2))
    assert first.data_ptr() == second.data_ptr()


def test_a_graph_under_capture_makes_no_table():
    # Prevents: boundaries read outside a graph that have values only after its replay.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inside = layout.dense_offsets(7, "cuda")
    assert layout.dense_offsets(8, "cuda").tolist() == [0, 8]
    graph.replay()
    assert inside.tolist() == [0, 7]


def test_first_asked_of_fake_tensors():
    # Prevents: a table without memory, for the rest of the process.
    with FakeTensorMode():
        layout.dense_offsets(3, "cuda")
    assert layout.dense_offsets(3, "cuda").tolist() == [0, 3]


def test_first_asked_without_gradients():
    # Prevents: boundaries that no autograd function may save, for the rest of the process.
    with torch.inference_mode():
        layout.dense_offsets(3, "cuda")
    assert not layout.dense_offsets(3, "cuda").is_inference()

# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Triton on Paddle's streams: in order with other work there, beside PyTorch, and in a CUDA graph."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddle_moe_ops import permute, route, use_backend
from tests.ops.problems import make_problem, tensor
from tests.packaging.subprocesses import run_python
from tests.params import MANY_TOKENS

pytestmark = pytest.mark.gpu_only


@pytest.fixture(autouse=True)
def triton_backend():
    with use_backend("triton"):
        yield


@pytest.fixture
def gpu(place):
    """The device of the kernels."""
    from paddle_moe_ops.triton.launch.paddle_device import device_of

    return device_of(paddle.to_tensor([0], dtype="int32", place=place))


def slow_copy(gpu, source, target, rounds):
    """Enqueue a copy that takes its time: one program that counts before it writes."""
    from tests.ops.triton_kernels import slow_copy_kernel

    addresses = source.data_ptr(), target.data_ptr()
    gpu.launch(slow_copy_kernel, 1, ("*i32", "*i32", "i64", "i64"), (*addresses, source.size, rounds), (1024,), 1)


def test_a_launch_waits_for_the_work_before_it_on_a_stream_of_the_user(gpu, device, place, rng):
    problem = make_problem(rng, MANY_TOKENS)
    plan = route(tensor(problem.ids, place), num_experts=MANY_TOKENS.E)
    late = rng.integers(0, 1000, problem.x.shape).astype(np.int32)
    source, x = tensor(late, place), tensor(np.zeros_like(late), place)
    slow_copy(gpu, source, tensor(np.zeros_like(late), place), 1)  # compiles it
    permute(x.view("float32"), plan)
    paddle.device.synchronize(device)
    stream = paddle.device.Stream(device)
    with paddle.device.stream_guard(stream):
        handle = gpu.stream()
        slow_copy(gpu, source, x, 20_000)
        assert not stream.query()  # otherwise nothing was waited for
        rows, _ = permute(x.view("float32"), plan)
    stream.synchronize()
    assert handle != gpu.stream()
    actual, tokens = rows.view("int32").numpy(), plan.row_to_token.numpy()
    np.testing.assert_array_equal(actual[tokens >= 0], late[tokens[tokens >= 0]])


IMPORTS = {
    "without torch": "",
    "torch before": "import torch; torch.ones(2, device='cuda')",
    "torch after": "import torch",
}
ORDER = """
{before}
import numpy as np, paddle
import paddle_moe_ops as ops
paddle.set_device({device!r})
ids = paddle.to_tensor([[0, 1], [1, -1]], dtype='int32')
x = paddle.to_tensor([[1.0, 2.0], [3.0, 4.0]])
def check():
    with ops.use_backend('triton'):
        plan = ops.route(ids, num_experts=2, buffer_size=3)
        assert ops.permute(x, plan)[0].numpy().tolist() == [[1.0, 2.0], [1.0, 2.0], [3.0, 4.0]]
def torch_kernel():
    import torch, triton
    from tests.ops.triton_kernels import slow_copy_kernel
    a, b = torch.arange(7, dtype=torch.int32, device='cuda'), torch.zeros(7, dtype=torch.int32, device='cuda')
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        slow_copy_kernel[(1,)](a, b, 7, 3, 1024)
    torch.cuda.synchronize()
    assert b.tolist() == list(range(7))
if {torch_first}: torch_kernel()
from triton.runtime import driver
found = driver._active
check()
assert driver._active is found
{after}
if {torch_last}:
    torch_kernel()
    found = driver._active
    check()
    assert driver._active is found
    torch_kernel()
"""


@pytest.mark.parametrize("torch", IMPORTS)
@pytest.mark.parametrize("variable", [None, "nvidia"])
def test_torch_and_its_driver_are_left_alone(device, torch, variable):
    first, last = torch == "torch before", torch != "without torch"
    imports = {"before": IMPORTS[torch], "after": ""} if first else {"before": "", "after": IMPORTS[torch]}
    code = ORDER.format(**imports, device=device, torch_first=first, torch_last=last)
    done = run_python(code, env={"TRITON_DEFAULT_BACKEND": variable} if variable else {})
    assert done.returncode == 0, done.stderr


def test_a_process_without_torch_needs_none(device):
    code = ORDER.format(before="", after="", device=device, torch_first=False, torch_last=False)
    done = run_python(code, missing=["torch"])
    assert done.returncode == 0, done.stderr

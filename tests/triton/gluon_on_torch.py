"""Gluon for Hopper, run by Python on torch's tensors: what ``TRITON_INTERPRET`` is to Triton.

:func:`emulate` lets kernels of a module run as they are written. Modelled are

- partitions of ``warp_specialize`` at their own speeds, copies that arrive late and in any order
  (:mod:`gluon_machine`), barriers with their arrivals, bytes and parities;
- shared memory: NaN at first, and again from the start of a copy to its end;
- asynchronous products: operands must be the same at the wait as at the start;
- global memory: loads and stores outside of a tensor's elements are faults, and so are two lanes
  of a store at one address;
- boxes outside of a descriptor's shape, which are zeros there;
- arithmetic in int32 and int64 as Gluon promotes them; an overflow of int32 is a fault.

NOT modelled are performance, warps and lanes, registers and their layouts (a layout is nothing
here, a conversion changes nothing), the size and the swizzle of shared memory, the memory model
(fences and the proxies of the copy engine: what is stored is seen), and what the compiler refuses
or gets wrong. Counters of loops that are numbers in Python stay so.

Anything of Gluon that the kernels do not use raises :class:`NotImplementedError`.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from gluon_machine import Barrier, Fault, Machine, poison
from triton.experimental.gluon import language as real_gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language.nvidia import hopper as real_hopper
from triton.experimental.gluon.nvidia import hopper as real_host
from triton.language import PropagateNan
from triton.language.extra import cuda

INT32 = torch.iinfo(torch.int32)


def emulate(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType, seed: int) -> Machine:
    """Until the end of the test, the kernels of the modules run here. Returns what runs them."""
    machine = Machine(seed)
    hopper = Hopper(machine)
    replaced = {
        id(real_gl): Gluon(machine),
        id(real_host.TensorDescriptor): TensorDescriptor,
        # Launches here follow one another.
        id(cuda.gdc_wait): lambda: None,
        id(cuda.gdc_launch_dependents): lambda: None,
        **{id(getattr(real_hopper, name)): getattr(hopper, name) for name in Hopper.NAMES},
    }
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, GluonJITFunction):
                monkeypatch.setattr(module, name, Function(value.fn, machine))
            elif id(value) in replaced:
                monkeypatch.setattr(module, name, replaced[id(value)])
            elif _origin(value).startswith("triton.experimental.gluon."):
                raise NotImplementedError(f"{name} of {_origin(value)}, in {module.__name__}")
    return machine


def _origin(value: object) -> str:
    """The module that a value is, or was defined in."""
    attribute = "__name__" if isinstance(value, ModuleType) else "__module__"
    return str(getattr(value, attribute, ""))


class Function:
    """A function under ``gluon.jit``: called by another one, or launched on a grid."""

    def __init__(self, function: Callable[..., Any], machine: Machine) -> None:
        self.function, self.machine = function, machine
        self.signature = inspect.signature(function)

    def __str__(self) -> str:
        return self.function.__name__

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.function(*arguments, **named)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(
        self,
        grid: tuple[int, ...],
        *arguments: Any,
        num_warps: int,
        launch_cooperative_grid: bool = False,
        launch_pdl: bool = False,
        maxnreg: int | None = None,
        **named: Any,
    ) -> None:
        values = self.signature.bind(*arguments, **named).arguments
        for name, parameter in self.signature.parameters.items():
            if "constexpr" not in str(parameter.annotation):
                values[name] = _argument(values[name])
        self.machine.run_programs(
            str(self),
            grid,
            partial(self.function, **values),
            is_cooperative=launch_cooperative_grid,
        )


def _argument(x: Any) -> Any:
    """An argument of a launch, as the kernel sees it."""
    if x is None or isinstance(x, TensorDescriptor):
        return x
    if isinstance(x, torch.Tensor):
        return Pointer(_elements(x))
    if isinstance(x, int | float):
        return Value(_tensor(x))
    raise NotImplementedError(f"arguments of {type(x).__name__}")


def _elements(x: torch.Tensor) -> torch.Tensor:
    """All memory from a tensor's first element to its last, as one axis."""
    size = 0
    if x.numel():
        size = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((size,), (1,), x.storage_offset())


class Value:
    """A number or a tile in registers; its operators are set below the class."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def type(self) -> SimpleNamespace:
        return SimpleNamespace(layout=None)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Value:
        return Value(self.data.view(dtype) if bitcast else self.data.to(dtype))

    def __getitem__(self, index: Any) -> Value:
        return Value(self.data[index])

    def __neg__(self) -> Value:
        return Value(-self.data)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)

    def __repr__(self) -> str:
        return f"Value({self.data})"


def _plain(x: Any) -> Any:
    """What a constant of Gluon holds."""
    while isinstance(x, real_gl.constexpr):
        x = x.value
    return x


def _sizes(shape: Sequence[Any]) -> list[int]:
    return [int(_plain(size)) for size in shape]


def _tensor(x: Any, other: Any = None) -> torch.Tensor:
    """An operand; a number in Python is of the other operand's kind where that can hold it."""
    x, other = _plain(x), _plain(other)
    if isinstance(x, Value):
        return x.data
    if isinstance(x, bool):
        return torch.tensor(x)
    if isinstance(other, Value) and other.dtype.is_floating_point:
        return torch.tensor(x, dtype=other.dtype)
    if isinstance(x, float):
        return torch.tensor(x, dtype=torch.float32)
    fits = INT32.min <= x <= INT32.max
    return torch.tensor(x, dtype=torch.int32 if fits else torch.int64)


def _operands(a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in the dtype of the result; torch's own rule gives numbers less weight than tiles."""
    x, y = _tensor(a, b), _tensor(b, a)
    dtype = torch.promote_types(x.dtype, y.dtype)
    return x.to(dtype), y.to(dtype)


def _compute(function: Callable[..., torch.Tensor], a: Any, b: Any) -> Value:
    x, y = _operands(a, b)
    if x.dtype != torch.int32:
        return Value(function(x, y))
    exact = function(x.long(), y.long())
    if exact.dtype != torch.int64:
        return Value(exact)
    result = exact.int()
    if not torch.equal(result, exact):
        raise Fault(f"an overflow of int32: {int(exact.min())} to {int(exact.max())}")
    return Value(result)


OPERATORS: dict[str, Callable[..., torch.Tensor]] = {
    **{name: getattr(operator, f"__{name}__") for name in ("add", "sub", "mul", "truediv")},
    **{name: getattr(operator, f"__{name}__") for name in ("and", "or", "lshift", "rshift")},
    **{name: getattr(operator, f"__{name}__") for name in ("lt", "le", "gt", "ge", "eq", "ne")},
    # Towards zero, where Python rounds down.
    "floordiv": partial(torch.div, rounding_mode="trunc"),
    "mod": torch.fmod,
}


def _set_operator(name: str, function: Callable[..., torch.Tensor]) -> None:
    def forward(self: Value, other: Any) -> Any:
        return NotImplemented if isinstance(other, Pointer) else _compute(function, self, other)

    def reflected(self: Value, other: Any) -> Value:
        return _compute(function, other, self)

    setattr(Value, f"__{name}__", forward)
    setattr(Value, f"__r{name}__", reflected)


for _name, _function in OPERATORS.items():
    _set_operator(_name, _function)


class Pointer:
    """Addresses of elements of a tensor."""

    def __init__(self, memory: torch.Tensor, offsets: torch.Tensor | None = None) -> None:
        self.memory = memory
        self.offsets = torch.tensor(0) if offsets is None else offsets

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.memory.dtype)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.offsets + _tensor(other).long())

    __radd__ = __add__

    def select(self, mask: Any, access: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The mask, and the offsets where it is set, which must be of the tensor's elements."""
        mask = torch.tensor(True) if mask is None else _tensor(mask)
        offsets, mask = torch.broadcast_tensors(self.offsets, mask)
        chosen = offsets[mask]
        outside = (chosen < 0) | (chosen >= self.memory.numel())
        if outside.any():
            first, size = int(chosen[outside][0]), self.memory.numel()
            raise Fault(f"a {access} out of bounds: element {first} of {size}")
        return mask, chosen


class SharedMemory:
    """A tile, or a ring of tiles, that partitions and copies share."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def index(self, i: Any) -> SharedMemory:
        return SharedMemory(self.data[_place(i, len(self.data))])

    def slice(self, start: Any, length: Any, dim: int = 0) -> SharedMemory:
        start, length = _sizes((start, length))
        _place(start + length - 1, self.data.shape[dim])
        return SharedMemory(self.data.narrow(dim, start, length))

    def permute(self, order: Sequence[int]) -> SharedMemory:
        return SharedMemory(self.data.permute(*order))

    def reshape(self, shape: Sequence[Any]) -> SharedMemory:
        return SharedMemory(self.data.view(_sizes(shape)))

    def load(self, layout: None) -> Value:
        return Value(self.data.clone())

    def store(self, value: Value) -> None:
        if value.dtype != self.dtype:
            raise Fault(f"a store of {value.dtype} to shared memory of {self.dtype}")
        self.data.copy_(value.data)

    def bits(self) -> torch.Tensor:
        """To compare: NaN is not NaN."""
        return self.data.view(torch.int16 if self.data.element_size() == 2 else torch.uint8)


class Barriers:
    """A ring of barriers."""

    def __init__(self, count: int) -> None:
        self.members = [Barrier() for _ in range(count)]

    def index(self, i: Any) -> Barrier:
        return self.members[_place(i, len(self.members))]


def _place(i: Any, size: int) -> int:
    place = int(_plain(i))
    if not 0 <= place < size:
        raise Fault(f"shared memory out of bounds: {place} of {size}")
    return place


class TensorDescriptor:
    """A tensor as the copy engine reads it."""

    def __init__(
        self,
        base: torch.Tensor,
        shape: list[int],
        strides: list[int],
        block_shape: list[int],
        layout: None,
    ) -> None:
        size = base.element_size()
        aligned = [base.data_ptr(), *(stride * size for stride in strides[:-1])]
        if any(x % 16 for x in aligned) or strides[-1] != 1:
            raise Fault(f"the copy engine reads no rows with strides {strides} of {size} bytes")
        if max(block_shape) > 256:
            raise Fault(f"the copy engine has no boxes of {block_shape}")
        end = base.storage_offset() + 1
        end += sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        if end * size > base.untyped_storage().nbytes():
            raise Fault(f"a descriptor of {shape} ends behind its tensor's memory")
        self.tensor = base.as_strided(shape, strides, base.storage_offset())
        self.block_shape = block_shape

    def read(self, *place: int) -> torch.Tensor:
        """The box at that place; what it has outside of the shape is zero."""
        box = torch.zeros(self.block_shape, dtype=self.tensor.dtype)
        sizes = zip(place, box.shape, self.tensor.shape, strict=True)
        inside = [_overlap(*each) for each in sizes]
        box[tuple(x[1] for x in inside)] = self.tensor[tuple(x[0] for x in inside)]
        return box


def _overlap(start: int, length: int, size: int) -> tuple[slice, slice]:
    """What of a box along one axis is inside: of ``0`` to ``size``, and of the box."""
    first = min(max(start, 0), size)
    last = max(min(start + length, size), first)
    return slice(first, last), slice(first - start, last - start)


class Product:
    """Asynchronous products into one accumulator, with their operands as they were at the start."""

    def __init__(self, accumulator: torch.Tensor) -> None:
        self.accumulator = accumulator
        self.last = 0  # of a partition's products, the number of its last one
        self.operands: list[tuple[SharedMemory, torch.Tensor]] = []

    def add(self, a: Value | SharedMemory, b: SharedMemory) -> None:
        if a.dtype != b.dtype:
            raise Fault(f"a product of {a.dtype} and {b.dtype}")
        self.accumulator = self.accumulator + a.data.float() @ b.data.float()
        shared = (x for x in (a, b) if isinstance(x, SharedMemory))
        self.operands += ((x, x.bits().clone()) for x in shared)

    def finish(self) -> Value:
        for operand, bits in self.operands:
            if not torch.equal(operand.bits(), bits):
                raise Fault("an operand changed while its product was in flight")
        return Value(self.accumulator)


class _Namespace:
    """Names of Gluon; one that is not there raises an error that says so."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(f"{name} of {type(self).__name__}, in {__name__}")


class MBarrier(_Namespace):
    """``mbarrier``"""

    def MBarrierLayout(self) -> type[Barrier]:
        return Barrier

    def init(self, barrier: Barrier, *, count: int) -> None:
        barrier.init(count)

    def expect(self, barrier: Barrier, size: Any, pred: Any = True) -> None:
        self.machine.may_pause()
        if _plain(pred):
            barrier.expect(int(_plain(size)))

    def arrive(self, barrier: Barrier, *, count: int, pred: Any = True) -> None:
        self.machine.may_pause()
        if _plain(pred):
            barrier.arrive(count)

    def wait(self, barrier: Barrier, phase: Any) -> None:
        self.machine.wait(barrier, int(_plain(phase)))


class TMA(_Namespace):
    """``tma``"""

    def async_copy_global_to_shared(
        self,
        descriptor: TensorDescriptor,
        place: Sequence[Any],
        barrier: Barrier,
        target: SharedMemory,
        pred: Any = True,
    ) -> None:
        if not _plain(pred):
            return
        if list(target.data.shape) != descriptor.block_shape:
            raise Fault(f"a box of {descriptor.block_shape} into {list(target.data.shape)}")
        read = partial(descriptor.read, *_sizes(place))
        self.machine.start_copy(read, target.data, barrier)


class Hopper(_Namespace):
    """``triton.experimental.gluon.language.nvidia.hopper``"""

    NAMES = ("fence_async_shared", "mbarrier", "tma", "warpgroup_mma", "warpgroup_mma_wait")

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.mbarrier, self.tma = MBarrier(machine), TMA(machine)

    def fence_async_shared(self) -> None:
        """Stores to shared memory are seen at once."""

    def warpgroup_mma(
        self,
        a: Value | SharedMemory,
        b: SharedMemory,
        acc: Value | Product,
        *,
        use_acc: bool = True,
        is_async: bool = False,
    ) -> Product:
        if not is_async:
            raise NotImplementedError("warpgroup_mma with is_async=False")
        if isinstance(acc, Product):
            product = acc
        else:
            product = Product(acc.data if use_acc else torch.zeros_like(acc.data))
        product.add(a, b)
        product.last = self.machine.count_product()
        self.machine.pause()
        return product

    def warpgroup_mma_wait(self, num_outstanding: int, *, deps: tuple[Product]) -> Value:
        self.machine.pause()
        (product,) = deps
        if product.last > self.machine.num_products() - num_outstanding:
            raise Fault("a product is used that may be in flight")
        return product.finish()


class Gluon(_Namespace):
    """``triton.experimental.gluon.language``"""

    constexpr = real_gl.constexpr
    bfloat16, float16, float32 = torch.bfloat16, torch.float16, torch.float32
    float8e4nv, float8e5 = torch.float8_e4m3fn, torch.float8_e5m2
    uint8, int16, int32, int64 = torch.uint8, torch.int16, torch.int32, torch.int64

    def _no_layout(self, *_: Any, **__: Any) -> None:
        """A layout: where a tile's elements lie is nobody's business here."""

    BlockedLayout = DistributedLinearLayout = DotOperandLayout = _no_layout
    NVMMADistributedLayout = NVMMASharedLayout = SwizzledSharedLayout = SliceLayout = _no_layout

    def program_id(self, axis: int) -> Value:
        return Value(_tensor(self.machine.program[axis]))

    def num_programs(self, axis: int) -> Value:
        return Value(_tensor(self.machine.grid[axis]))

    def thread_barrier(self) -> None:
        """A partition is one thread, and nothing runs before ``warp_specialize``."""

    def atomic_add(self, pointer: Pointer, value: Any, *, sem: str, scope: str) -> Value:
        """Of one element, at once; 0 is added to wait for what another partition adds."""
        if sem not in ("acquire", "release", "acq_rel") or scope != "gpu":
            raise NotImplementedError(f"atomic_add with {sem}, {scope}")
        if value:
            self.machine.may_pause()
        else:
            place = pointer.memory.data_ptr(), int(pointer.offsets)
            self.machine.look(place, lambda: int(pointer.memory[place[1]]))
        before = self.load(pointer)
        self.store(pointer, before + value)
        return before

    def static_range(self, *bounds: Any) -> range:
        return range(*_sizes(bounds))

    def allocate_shared_memory(
        self, dtype: torch.dtype, shape: Sequence[Any], layout: type[Barrier] | None
    ) -> SharedMemory | Barriers | Barrier:
        sizes = _sizes(shape)
        if layout is Barrier:
            return Barrier() if sizes == [1] else Barriers(sizes[0])
        return SharedMemory(poison(torch.empty(sizes, dtype=dtype)))

    def warp_specialize(
        self,
        functions: Sequence[tuple[Function, Sequence[Any]]],
        warps: Sequence[int],
        registers: Sequence[int],
    ) -> None:
        if not len(functions) == len(warps) + 1 == len(registers) + 1:
            raise Fault("warps and registers are those of all partitions but the first")
        for function, arguments in functions:
            _name_barriers(function, arguments)
        self.machine.run_partitions(functions)

    def load(
        self,
        pointer: Pointer,
        mask: Any = None,
        other: Any = None,
        cache_modifier: str = "",
        volatile: bool = False,
    ) -> Value:
        if mask is not None and other is None:
            raise NotImplementedError("load with a mask and no other")
        mask, offsets = pointer.select(mask, "load")
        result = torch.full(mask.shape, other or 0, dtype=pointer.memory.dtype)
        result[mask] = pointer.memory[offsets]
        return Value(result)

    def store(self, pointer: Pointer, value: Any, mask: Any = None) -> None:
        mask, offsets = pointer.select(mask, "store")
        if offsets.unique().numel() != offsets.numel():
            raise Fault("a store of two elements at one address")
        values = _tensor(value).to(pointer.memory.dtype).expand(mask.shape)
        pointer.memory[offsets] = values[mask]

    def associative_scan(self, x: Value, axis: int, combine: Function) -> Value:
        """Each adds what is 1, 2, 4, ... before it: a step for an element would take far longer."""
        data, size, step = x.data, x.shape[axis], 1
        while step < size:
            before, behind = (Value(data.narrow(axis, i, size - step)) for i in (0, step))
            later = combine(before, behind).data
            data = torch.cat((data.narrow(axis, 0, step), later), axis)
            step *= 2
        return Value(data)

    def arange(self, start: Any, end: Any, *, layout: None) -> Value:
        return Value(torch.arange(*_sizes((start, end)), dtype=torch.int32))

    def zeros(self, shape: Sequence[Any], dtype: torch.dtype, *, layout: None) -> Value:
        return Value(torch.zeros(_sizes(shape), dtype=dtype))

    def full(self, shape: Sequence[Any], value: Any, dtype: torch.dtype, *, layout: None) -> Value:
        return Value(_tensor(_plain(value)).to(dtype).expand(_sizes(shape)).clone())

    def reshape(self, x: Value, shape: Sequence[Any]) -> Value:
        return Value(x.data.reshape(_sizes(shape)))

    def permute(self, x: Value, order: Sequence[Any]) -> Value:
        return Value(x.data.permute(_sizes(order)))

    def inline_asm_elementwise(
        self,
        asm: Any,
        constraints: str,
        args: Sequence[Value],
        dtype: torch.dtype | Sequence[torch.dtype],
        is_pure: bool,
        pack: int,
    ) -> Value | tuple[Value, ...]:
        """``pack`` elements at a time, side by side in as few registers as hold them."""
        dtypes = [dtype] if isinstance(dtype, torch.dtype) else dtype
        words = [
            word
            for x in torch.broadcast_tensors(*(x.data for x in args))
            for word in _registers(x, pack)
        ]
        counts = [max(pack * each.itemsize // 4, 1) for each in dtypes]
        if constraints != ",".join(["=r"] * sum(counts) + ["r"] * len(words)):
            raise NotImplementedError(f"inline_asm_elementwise with {constraints}")
        names = [f"${sum(counts) + i}" for i in range(len(words))]
        results = run_ptx(str(_plain(asm)), names, words)
        shape = torch.broadcast_shapes(*(x.shape for x in args))
        values, first = [], 0
        for each, count in zip(dtypes, counts, strict=True):
            out = torch.stack([results[f"${first + i}"] for i in range(count)], -1)
            values.append(Value((out - (out >> 31 << 32)).int().view(each).reshape(shape)))
            first += count
        return values[0] if isinstance(dtype, torch.dtype) else tuple(values)

    def expand_dims(self, x: Value, axis: int) -> Value:
        return Value(x.data.unsqueeze(axis))

    def join(self, x: Value, y: Value) -> Value:
        return Value(torch.stack((x.data, y.data), -1))

    def split(self, x: Value) -> tuple[Value, Value]:
        first, second = x.data.unbind(-1)
        return Value(first), Value(second)

    def convert_layout(self, x: Value, layout: None) -> Value:
        return x

    def where(self, condition: Value, x: Any, y: Any) -> Value:
        return Value(torch.where(condition.data, *_operands(x, y)))

    def minimum(self, x: Any, y: Any) -> Value:
        return Value(torch.fmin(*_operands(x, y)))

    def maximum(self, x: Any, y: Any, propagate_nan: Any = None) -> Value:
        function = torch.maximum if propagate_nan == PropagateNan.ALL else torch.fmax
        return Value(function(*_operands(x, y)))

    def reduce(self, x: Value, axis: int, combine: Function) -> Value:
        data = x.data
        while (size := data.shape[axis]) > 1:
            halves = (Value(half) for half in data.split(size // 2, axis))
            data = combine(*halves).data
        return Value(data.squeeze(axis))

    def max(self, x: Value, axis: int) -> Value:
        """Of the numbers: Gluon's too passes NaN over."""
        return Value(x.data.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(axis))

    def sum(self, x: Value, axis: int) -> Value:
        return Value(x.data.sum(axis, dtype=x.dtype))

    def exp2(self, x: Value) -> Value:
        return Value(torch.exp2(x.data))

    def log2(self, x: Value) -> Value:
        return Value(torch.log2(x.data))


def _registers(x: torch.Tensor, pack: int) -> Sequence[torch.Tensor]:
    """Registers of each ``pack`` elements of a tile."""
    bits = x.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    return bits.reshape(-1, max(pack * x.itemsize // 4, 1)).unbind(-1)


def run_ptx(asm: str, names: Sequence[str], inputs: Sequence[torch.Tensor]) -> dict[str, Any]:
    """All registers after some instructions on 32 bits, each lane of a tensor by itself."""
    registers: dict[str, Any] = dict(zip(names, inputs, strict=True))

    def operand(word: str) -> Any:
        return registers[word] if word in registers else int(word, 0)

    for line in asm.strip().strip("{}").replace("\n", " ").split(";"):
        operation, *words = line.replace(",", " ").split() or [".reg"]
        if operation == ".reg":
            continue
        if operation not in PTX:
            raise NotImplementedError(f"{operation} of PTX")
        target, *operands = words
        registers[target] = PTX[operation](*map(operand, operands)) & 0xFFFFFFFF
    return registers


def _prmt(a: Any, b: Any, selector: int) -> Any:
    both = a | (b << 32)
    nibbles = [selector >> (4 * i) & 0xF for i in range(4)]
    if any(nibble > 7 for nibble in nibbles):
        raise NotImplementedError("prmt that replicates signs")
    return sum(((both >> (8 * nibble)) & 0xFF) << (8 * i) for i, nibble in enumerate(nibbles))


def _lop3(a: Any, b: Any, c: Any, table: int) -> Any:
    """A bit of the table for each of the eight combinations of three bits."""
    result = a & 0
    for i in range(8):
        if table >> i & 1:
            x, y, z = ((u if i >> k & 1 else ~u) for u, k in ((a, 2), (b, 1), (c, 0)))
            result = result | (x & y & z)
    return result


PTX: dict[str, Callable[..., Any]] = {
    "and.b32": operator.and_,
    "shl.b32": operator.lshift,
    "shr.b32": operator.rshift,
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
}


def _name_barriers(function: Function, arguments: Sequence[Any]) -> None:
    """Barriers get the names of the parameters that they are passed for."""
    for name, value in function.signature.bind(*arguments).arguments.items():
        if isinstance(value, Barrier):
            value.name = name
        elif isinstance(value, Barriers):
            for i, barrier in enumerate(value.members):
                barrier.name = f"{name}[{i}]"

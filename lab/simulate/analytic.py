"""How long a step takes by arithmetic: a roofline over a device's and a model's numbers.

    seconds = max(bytes read / bandwidth, operations / matrix rate) + all-reduces + blocks moved / host link + overhead

Bytes: every weight once a step, the keys and values that each chunk attends to. Operations: two per parameter and
token, four per layer, head element and (token, key) pair. Both are shared evenly by `tensor_parallel` devices, which exchange
two activations a layer (Williams et al., Roofline, CACM 2009; Pope et al., MLSys 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

from turnout.lab.simulate.hardware import hardware_of, model_of
from turnout.lab.workload.work import Work


@dataclass
class Analytic:
    """A roofline. Numbers left null are those of the hardware."""

    hardware: str = "h200"
    model: str = "llama-3-8b"  # or a folder with a config.json
    tensor_parallel: int = 1  # devices
    weight_bytes: float = 2.0  # of a parameter
    kv_bytes: float = 2.0  # of an element in the key/value cache
    bandwidth: float | None = None  # bytes/s
    flops: float | None = None  # 1/s
    memory: float | None = None  # bytes of one device
    link: float | None = None  # bytes/s between devices, one direction
    overhead: float | None = None  # seconds of a step before anything is computed
    bandwidth_share: float = 0.8  # of the bandwidth that is reached
    flops_share: float = 0.6  # of the matrix rate that is reached

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, (int, float)) and (value < 0 or (value == 0 and name != "overhead")):
                raise ValueError(f"latency.{name} must be above 0, got {value}")
        for name in ("bandwidth_share", "flops_share"):
            if getattr(self, name) > 1.0:
                raise ValueError(f"latency.{name} must be at most 1, got {getattr(self, name)}")

    def start(self, block_size: int) -> None:
        shape, device, num = model_of(self.model), hardware_of(self.hardware), self.tensor_parallel
        if shape.num_kv_heads % num:
            raise ValueError(
                f"latency.tensor_parallel must divide the {shape.num_kv_heads} key/value heads of {self.model}: {num}"
            )
        self._shape, self._device = shape, device
        self._bandwidth, self._flops = self.bandwidth or device.bandwidth, self.flops or device.flops
        self._memory, self._link = self.memory or device.memory, self.link or device.link
        self._overhead = device.overhead if self.overhead is None else self.overhead
        byte, operation = 1 / (self._bandwidth * self.bandwidth_share * num), 1 / (self._flops * self.flops_share * num)
        read = shape.layer_parameters + shape.embedding  # of the input embedding a step reads single rows
        self._weights, self._key = read * self.weight_bytes * byte, shape.kv_per_token * self.kv_bytes * byte
        self._token, self._sample = 2 * shape.layer_parameters * operation, 2 * shape.embedding * operation
        self._pair = 4 * shape.num_layers * shape.num_heads * shape.head_dim * operation
        self._all_reduce = self._exchange = 0.0
        if num > 1:
            self._all_reduce = 2 * shape.num_layers * device.link_latency
            self._exchange = 2 * shape.num_layers * 2 * (num - 1) / num * shape.hidden * self.weight_bytes / self._link
        block = shape.kv_per_token * self.kv_bytes * block_size / num
        self._moved, self._copied = block / device.host_link, 2 * block / (self._bandwidth * self.bandwidth_share)

    def seconds(self, work: Work) -> float:
        tokens = work.prefill_tokens + work.decodes
        memory = self._weights + self._key * (work.prefill_keys + work.decode_keys)
        compute = self._token * tokens + self._sample * work.samples
        compute += self._pair * (work.prefill_pairs + work.decode_keys)
        spent = max(memory, compute) + self._overhead + self._all_reduce + self._exchange * tokens
        return spent + self._moved * work.moved_blocks + self._copied * work.copied_blocks

    def blocks(self, block_size: int, gpu_share: float, cpu_share: float) -> tuple[int, str]:
        """How many blocks the devices' memory holds beside the weights, and a sentence that says how it was reckoned.
        Raises ValueError when there is no room."""
        share, key = (
            (cpu_share, "limits.cpu_memory_utilization")
            if self.hardware == "cpu"
            else (gpu_share, "limits.gpu_memory_utilization")
        )
        weights = self._shape.num_parameters * self.weight_bytes
        room = self._memory * self.tensor_parallel * share - weights
        size = self._shape.kv_per_token * self.kv_bytes * block_size
        if room < size:
            raise ValueError(
                f"{self.model} takes {weights / 1e9:.1f} GB, {key}={share} of {self.tensor_parallel} x "
                f"{self._memory / 1e9:.0f} GB leaves no room for a key/value cache; raise latency.tensor_parallel or "
                f"{key}, lower latency.weight_bytes, or set blocks.num_blocks"
            )
        return int(room // size), f"the key/value cache takes {room / 1e9:.1f} GB, what {key}={share} leaves"

    @property
    def max_len(self) -> int:
        return self._shape.max_len

    def assumptions(self) -> list[str]:
        device, shape, num = self._device, self._shape, self.tensor_parallel
        rates = (
            f"{num} x {device.title}: {self._bandwidth / 1e12:.3g} TB/s at {self.bandwidth_share:.0%}, "
            f"{self._flops / 1e12:.3g} TFLOP/s at {self.flops_share:.0%}, {self._memory / 1e9:.0f} GB each, "
            f"{self._overhead * 1e3:.3g} ms a step beside the arithmetic"
        )
        sizes = (
            f"{self.model}: {shape.num_parameters / 1e9:.3g} billion parameters of {self.weight_bytes:g} bytes, "
            f"{shape.kv_per_token * self.kv_bytes / 1024:.0f} KiB of cache a token"
        )
        words = [
            rates,
            sizes,
            "a step takes the longer of reading weights and cache and of computing; nothing else is in the way",
        ]
        if num > 1:
            words.append(
                f"tensor parallel: work is shared evenly, two all-reduces a layer of {device.link_latency * 1e6:.0f} µs"
                f" and {self._link / 1e9:.0f} GB/s, not overlapped"
            )
        words.append(f"swapped blocks go over {device.host_link / 1e9:.0f} GB/s, not overlapped")
        return words

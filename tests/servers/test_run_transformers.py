"""Real transformers under `kvprobe run`: tokens identical with and without it, a report at the end."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.servers

pytest.importorskip("transformers")

# On a CPU the offloaded cache needs a stand-in for the stream that it hard-codes, and pinned memory has to be dropped.
MODEL = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(1)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
                     num_attention_heads=4, num_key_value_heads=2, eos_token_id=None)
model = LlamaForCausalLM(config).eval()
"""
OFFLOADED_CACHE = (
    MODEL
    + """
from transformers import DynamicCache
class Stream:
    def wait_stream(self, other): pass
    def __enter__(self): return self
    def __exit__(self, *exc): return False
torch.cuda.default_stream = lambda device=None: Stream()
cache = DynamicCache(config=config, offloading=True)
cache.prefetch_stream = Stream()
print(model.generate(torch.randint(0, 64, (1, 8)), max_new_tokens=12, do_sample=False, past_key_values=cache).tolist())
"""
)
CONTINUOUS_BATCHING = (
    MODEL
    + """
from transformers import ContinuousBatchingConfig, GenerationConfig
empty = torch.empty
torch.empty = lambda *a, **k: empty(*a, **{**k, "pin_memory": False} if "pin_memory" in k else k)
model.set_attn_implementation("sdpa")
prompts = [[i + 1] * 20 for i in range(6)]
generation = GenerationConfig(max_new_tokens=24, do_sample=False, eos_token_id=-1, pad_token_id=0)
batching = ContinuousBatchingConfig(page_size=16, max_batch_tokens=256, safety_margin=0.0, allow_block_sharing=False,
                                    num_blocks=12, cpu_offload_space=0.01)
done = model.generate_batch(prompts, generation_config=generation, continuous_batching_config=batching)
print([result.generated_tokens for _, result in sorted(done.items())])
"""
)


def wait_for_report(folder: Path) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end and not (folder / "report.html").exists():
        with contextlib.suppress(OSError, ValueError):
            json.loads((folder / "end.json").read_text())
        time.sleep(0.1)


@pytest.mark.parametrize("program", [OFFLOADED_CACHE, CONTINUOUS_BATCHING], ids=["offloaded", "continuous"])
@pytest.mark.parametrize("fix", ["off", "auto"])
def test_output_is_identical_and_the_report_is_written(tmp_path: Path, program: str, fix: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(program)
    env = {k: v for k, v in os.environ.items() if not k.startswith("KVPROBE") and k != "LD_PRELOAD"}
    plain = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, check=True)
    folder = tmp_path / "run"
    watched = subprocess.run(
        [sys.executable, "-m", "kvprobe", "run", "-o", folder, "--fix", fix, "--", sys.executable, script],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert watched.stdout == plain.stdout and "[[" in plain.stdout
    wait_for_report(folder)
    assert (folder / "report.html").stat().st_size > 1000
    from kvprobe.recordings import open_recording

    recording = open_recording(folder)
    assert recording.processes.rows == 1 and recording.ranges.rows + recording.transfers.rows > 0
    assert any("transformers" in note and "applied" in note for note in recording.notes)

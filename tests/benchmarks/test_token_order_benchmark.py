"""benchmarks/token_order.py on one of two fake ranks."""

import argparse
import sys

from commands import ROOT
from unchecked import unchecked

from titan_dit.dry_run.fake_step import fake_world
from titan_dit.parallel.mesh import AxisSizes, Mesh

sys.path.insert(0, str(ROOT / "benchmarks"))
import token_order


def test_one_order_copies_the_tokens_around_every_collective():
    options = argparse.Namespace(size="S/2", latent=8, batch=2, dtype="fp32", compile=False)
    copies = []
    with fake_world(0, 2), unchecked():
        mesh = Mesh(AxisSizes(tp=2), "cpu")
        for way in token_order.WAYS:
            step = token_order.step_of(way, options, mesh)
            with token_order.Copies(least=2 * 16 * 384 // 2) as counted:
                step()
            copies.append(counted.calls)
    # Twelve layers, and the whole tokens at the ends of the network.
    assert copies[0] - copies[1] == 8 * 12 + 2

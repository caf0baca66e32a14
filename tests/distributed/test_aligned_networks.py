"""[repa] on networks that take captions: gradients of one process on every axis."""

import pytest
from harness import on_ranks
from test_grid import CP, FOLDED, PLAIN, PP, TP, blocks_of_kinds, compare, measure, schedule
from tiny_joint import joint_config
from tiny_repa import repa

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

LAYOUTS = [(TP, {}), (CP, {}), (PLAIN, {}), (PP, FOLDED), (PP, schedule("zbv_zero_bubble"))]
# Size of a latent, patch.
NETWORKS = {"joint_dit": ([4, 8], 2), "flux2": ([4, 8], 1), "z_image": ([8, 16], 2)}


def measured(world, name, projector, layouts):
    size, patch = NETWORKS[name]
    layers = {"num_layers": 5} if name == "joint_dit" else blocks_of_kinds(name, 5)
    return [
        measure(
            world,
            joint_config(
                name,
                model=layers | {"latent_size": size},
                data={
                    "name": "tiny_repa:FeaturedCaptions",
                    "patch_size": patch,
                    "masks": projector == "mlp",
                },
                repa=repa(block=3, projector=projector),
                parallel=parallel,
                pipeline=pipeline,
                precision={"dtype": "fp64"},
                training={"global_batch_size": 8, "microbatch_size": 2},
            ),
        )
        for parallel, pipeline in layouts
    ]


@pytest.mark.parametrize("projector", ["mlp", "conv"])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_layout_gives_the_gradients_of_one_process(name, projector):
    [[wanted]] = on_ranks(1, measured, name, projector, [({}, {})])
    own = {parameter for parameter in wanted[1] if parameter.startswith("objective.2.")}
    by_rank = on_ranks(2, measured, name, projector, LAYOUTS)
    for place, layout in enumerate(LAYOUTS):
        found = [ranks[place] for ranks in by_rank]
        assert own <= {parameter for each in found for parameter in each[1]}
        assert max(compare(each, wanted)["gradient"] for each in found) <= 1e-9, layout

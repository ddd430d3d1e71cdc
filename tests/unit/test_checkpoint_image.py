"""What a checkpoint holds."""

import torch

from stoker.train.checkpoints.image import image_of


def test_tensors_are_named_by_the_way_to_them() -> None:
    state = {
        "modules": {"model": {"0.weight": torch.ones(2, 3)}},
        "optimizers": {"adam": {"state": {0: {"step": torch.tensor(1.0)}}, "groups": [{"lr": 0.1}]}},
        "values": {"seen": (1, torch.zeros(2)), "a.b": torch.ones(1), "a": {"b": torch.ones(1)}},
    }
    image = image_of(7, state)
    assert [piece.name for piece in image.pieces] == [
        "modules.model.0.weight",
        "optimizers.adam.state.0.step",
        "values.seen.1",
        "values.a.b",
        "values.a.b~2",
    ]
    assert image.pieces[0].shape == (2, 3)
    assert image.pieces[0].offsets == (0, 0)
    again = image.state()
    assert again["values"]["seen"][0] == 1
    assert again["optimizers"]["adam"]["state"][0]["step"] is not None
    assert torch.equal(again["modules"]["model"]["0.weight"], torch.ones(2, 3))

"""The error messages for invalid timm backbones, which are raised before a model is built."""

import pytest

from fedsweep.common.errors import UserError
from fedsweep.models import TimmBackbone

WORKS = (
    "but fedsweep can run only timm's VisionTransformer (ViT, DeiT, DINOv2), MlpMixer, Beit and Eva (EVA-02, DINOv3) "
    "block by block, with two sublayers in every block."
)
VIT = "vit_base_patch16_224"
FIRST = "`backbone.model` "
REFUSALS = [
    # names
    ({"model": "vit_bas_patch16_224"}, f"{FIRST}vit_bas_patch16_224 is not a model of timm; the nearest are {VIT}, "),
    ({"model": "zzzzzzzz"}, f"{FIRST}zzzzzzzz is not a model of timm."),
    ({"model": "hf-hub:timm/test_vit"}, f"{FIRST}hf-hub:timm/test_vit is not a model of timm."),
    ({"model": "vit_base_patch16_224_in21k"}, f"{FIRST}vit_base_patch16_224_in21k is an old name: timm now calls it "),
    (
        {"model": f"{VIT}.augreg2"},
        f"timm has no weights `augreg2` of {VIT}; available are {VIT}.augreg2_in21k_ft_in1k, ",
    ),
    ({"model": f"{VIT}."}, f"{FIRST}{VIT}. ends in a dot; available are {VIT}.augreg2_in21k_ft_in1k, "),
    ({"model": ""}, '`model` string should have at least 1 character, but it is "".'),
    # weights without a tag, or missing weights
    (
        {"pretrained": "timm"},
        f"{FIRST}{VIT} must include the tag of its weights if `backbone.pretrained` is timm; timm's current default is "
        f"{VIT}.augreg2_in21k_ft_in1k, and others are {VIT}.augreg_in1k, {VIT}.augreg_in21k, ",
    ),
    (
        {"model": "vit_tiny_patch16_384", "pretrained": "timm"},
        f"{FIRST}vit_tiny_patch16_384 must include the tag of its weights if `backbone.pretrained` is timm; timm's "
        "current default is vit_tiny_patch16_384.augreg_in21k_ft_in1k, and there are no others.",
    ),
    (
        {"model": "vit_small_patch16_36x1_224", "pretrained": "timm"},
        "timm has no weights of vit_small_patch16_36x1_224; set `backbone.pretrained` to none or to a file.",
    ),
    (
        {"pretrained": "tmm"},
        "`backbone.pretrained` must be timm, none, or a file or folder of weights (.safetensors, .pth, .pt, .bin, or a "
        "path with a slash), but it is `tmm`.",
    ),
    ({"pretrained": ""}, '`pretrained` string should have at least 1 character, but it is "".'),
    ({"sha256": "0" * 64}, "`backbone.sha256` pins a weights file, but `backbone.pretrained` is none."),
    ({"sha256": "0", "pretrained": "a.pth"}, "`sha256` must match '^[0-9a-f]{64}$', but it is \"0\"."),
    # structures
    ({"model": "resnet50"}, f"{FIRST}resnet50 is a ResNet, {WORKS}"),
    ({"model": "convnext_tiny"}, f"{FIRST}convnext_tiny is a ConvNeXt, {WORKS}"),
    (
        {"model": "swin_tiny_patch4_window7_224"},
        f"{FIRST}swin_tiny_patch4_window7_224 is a SwinTransformer (stem: PatchEmbed), {WORKS}",
    ),
    ({"model": "gmlp_s16_224"}, f"{FIRST}gmlp_s16_224 is a MlpMixer (blocks: SpatialGatingBlock), {WORKS}"),
    ({"model": "resmlp_12_224"}, f"{FIRST}resmlp_12_224 is a MlpMixer (blocks: ResBlock), {WORKS}"),
    (
        {"model": "vit_base_patch16_xp_224"},
        f"{FIRST}vit_base_patch16_xp_224 is a VisionTransformer (blocks: ParallelScalingBlock; stem: PatchEmbed), "
        f"{WORKS}",
    ),
    (
        {"model": "vit_small_patch16_18x2_224"},
        f"{FIRST}vit_small_patch16_18x2_224 is a VisionTransformer (blocks: ParallelThingsBlock; stem: PatchEmbed), "
        f"{WORKS}",
    ),
    (
        {"model": "vit_base_r50_s16_224"},
        f"{FIRST}vit_base_r50_s16_224 is a VisionTransformer (blocks: Block; stem: HybridEmbed), {WORKS}",
    ),
    ({"model": "cait_s24_224"}, f"{FIRST}cait_s24_224 is a Cait (blocks: LayerScaleBlock; stem: PatchEmbed), {WORKS}"),
    # shapes
    ({"img_size": 100}, "`backbone.img_size` must be a multiple of the patch size 16, but it is 100."),
    ({"patch_size": 15}, "`backbone.img_size` must be a multiple of the patch size 15, but it is 224."),
    ({"img_size": 0}, "`img_size` must be greater than 0, but it is 0."),
    ({"num_blocks": 2.0}, "`num_blocks` must be an integer, but it is 2.0."),
    ({"in_chans": 4}, "`in_chans` must be 1 or 3, but it is 4."),
    ({"embed_dim": 100}, f"timm cannot build `backbone.model` {VIT} in this shape: "),
    ({"model": "mixer_b16_224", "num_heads": 3}, "`backbone.num_heads` is given, but mixer_b16_224 has no attention h"),
    (
        {"model": "gmixer_12_224", "num_blocks": 3},
        "timm cannot build `backbone.model` gmixer_12_224 in this shape: only the Mixers with plain MLPs (`mixer_*`) "
        "can have another shape than timm's.",
    ),
    ({"mean": [0.5, 0.5]}, "`mean.2` is missing."),
    ({"std": [0.5, 0.0, 0.5]}, "`std.1` must be greater than or equal to 0.000001, but it is 0.0."),
    ({"mean": [1e39, 0.0, 0.0]}, "`mean.0` must be less than or equal to 1000, but it is 1e+39."),
    # shapes that the weights fix
    *(
        (
            {"model": f"{VIT}.mae", "pretrained": "timm", field: 12},
            f"`backbone.{field}` must be null, because timm's weights {VIT}.mae fix it.",
        )
        for field in ("embed_dim", "num_blocks", "num_heads")
    ),
    *(
        (
            {"model": "mixer_b16_224.goog_in21k", "pretrained": "timm", field: 32},
            f"`backbone.{field}` must be null, because timm's weights mixer_b16_224.goog_in21k fix it.",
        )
        for field in ("img_size", "patch_size")
    ),
]


@pytest.mark.parametrize(("changes", "sentence"), REFUSALS)
def test_an_invalid_backbone_is_one_error_message(changes, sentence):
    with pytest.raises(UserError) as refusal:
        TimmBackbone.of({"name": "timm", "model": VIT, "pretrained": "none", **changes}, "run")
    said = str(refusal.value)
    assert said.startswith(f"run: {sentence}")
    assert said.endswith(".")
    assert "\n" not in said
    if sentence.endswith("."):
        assert said == f"run: {sentence}"


def test_the_error_message_of_a_run_starts_with_the_experiments_name(experiment):
    backbone = {"name": "timm", "model": "resnet50", "pretrained": "none"}
    with pytest.raises(UserError) as refusal:
        experiment.override({"backbone": backbone}, "experiment x")
    assert str(refusal.value) == f"experiment x: `backbone.model` resnet50 is a ResNet, {WORKS}"
    with pytest.raises(UserError) as refusal:
        experiment.override({"backbone": {**backbone, "mdel": "x"}}, "experiment x")
    assert str(refusal.value).startswith("experiment x: `backbone.mdel` is not a hyperparameter of this run")
    assert "did you mean `backbone.model`" in str(refusal.value)
    with pytest.raises(UserError) as refusal:
        experiment.override({"backbone": "timm"}, "experiment x")
    assert str(refusal.value).splitlines() == [
        "experiment x has 2 mistakes:",
        "- `backbone.model` is missing.",
        "- `backbone.pretrained` is missing.",
    ]


def test_a_long_list_of_tags_is_shortened():
    with pytest.raises(UserError, match=r"(, [\w.]+){5} and \d+ more\.$"):
        TimmBackbone.of({"name": "timm", "model": f"{VIT}.x", "pretrained": "none"}, "run")

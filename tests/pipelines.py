"""Functions that write small text-to-image checkpoints like diffusers."""

import warnings
from pathlib import Path

import torch
from safetensors.torch import save_file

from fedsweep.models.clip.backbone import SHIPPED

WIDTH, LONGEST, START, END, VOCABULARY = 16, 32, 607, 608, 609


def write_pipeline(folder: Path, seed: int = 0) -> Path:
    """Write a StableDiffusionPipeline with random weights for images of 32 pixels, with digits_clip's tokenizer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
        from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer
        from transformers.utils import logging

    logging.disable_progress_bar()
    special = {"bos_token_id": START, "eos_token_id": END, "pad_token_id": END}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        text = CLIPTextConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=LONGEST,
            **special,
        )
        unet = UNet2DConditionModel(
            sample_size=16,
            block_out_channels=(8, 16),
            layers_per_block=1,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=WIDTH,
            attention_head_dim=2,
            norm_num_groups=4,
        )
        vae = AutoencoderKL(
            block_out_channels=(8, 16),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            norm_num_groups=4,
            sample_size=32,
        )
        pipeline = StableDiffusionPipeline(
            vae=vae,
            text_encoder=CLIPTextModel(text),
            tokenizer=CLIPTokenizer.from_pretrained(SHIPPED / "digits_clip", local_files_only=True),
            unet=unet,
            scheduler=DDIMScheduler(steps_offset=1, clip_sample=False),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
    pipeline.save_pretrained(folder)
    return folder


def write_embedding(path: Path, vectors: int = 1, seed: int = 5, width: int = WIDTH) -> Path:
    """Write a textual inversion, which is a learned token, with the given number of vectors."""
    drawn = 3 * torch.randn(vectors, width, generator=torch.Generator().manual_seed(seed))
    save_file({"<learned>": drawn[0] if vectors == 1 else drawn}, path)
    return path

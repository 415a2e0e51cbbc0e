"""Trained models as folders that timm, transformers and PEFT load without fedsweep, and their predictions.

    README.md  export.json                             for humans and for programs
    adapter_config.json  adapter_model.safetensors     PEFT's own files: LoRA and the head
    backbone.safetensors                               timm's weights, unless a pinned tag names them
    backbone/                                          a CLIP's checkpoint, unless it comes from the hub
    model.safetensors                                  instead of these, all weights of a method without LoRA

A folder appears only once it is complete, and has been loaded and compared with the run's own evaluation.
"""

"""A trained model as a folder that timm, transformers and PEFT load without fedsweep, and what it says of images.

    README.md  export.json                             for people, and for programs
    adapter_config.json  adapter_model.safetensors     PEFT's own files: LoRA and the head
    backbone.safetensors                               timm's weights, where no pinned tag stands for them
    backbone/                                          the CLIP's checkpoint, where it is none of the hub's
    model.safetensors                                  in their place where a method trains weights whole

The folder is complete or is not there, and has been loaded and compared with the run's own evaluation before it is.
"""

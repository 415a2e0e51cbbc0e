"""Export of trained models to folders that timm, transformers and PEFT load without fedsweep.

`predict` classifies images with an exported model. An export contains these files:

    README.md  export.json                             descriptions of the model for people and for programs
    adapter_config.json  adapter_model.safetensors     the files of PEFT, with LoRA and the head
    backbone.safetensors                               a timm backbone, unless timm provides the same weights
    backbone/                                          a CLIP checkpoint, unless Hugging Face's hub provides it
    model.safetensors                                  all weights, for a method without LoRA; no other file has weights

The folder is created only after the exported model has been loaded and has given the same logits as the run.
"""

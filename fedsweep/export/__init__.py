"""Export of trained models to folders that timm, transformers and PEFT can load without fedsweep.

The module `predict` classifies images with an exported model. An export contains these files:

    README.md  export.json                             descriptions of the model for people and for programs
    adapter_config.json  adapter_model.safetensors     PEFT's files, with the LoRA weights and the head
    backbone.safetensors                               the timm backbone, unless timm provides the same weights
    backbone/                                          the CLIP checkpoint, unless Hugging Face's hub provides it
    model.safetensors                                  all weights, if the method does not use LoRA

The folder is created only after the exported model has been loaded again and has computed the same logits as the
model of the run.
"""

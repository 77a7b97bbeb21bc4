/* The seeds' names of the decoder structs. */
#ifndef LLAISYS_MODELS_QWEN2_H
#define LLAISYS_MODELS_QWEN2_H

#include "llaisys/models/decoder.h"

typedef LlaisysDecoderMeta LlaisysQwen2Meta;
typedef LlaisysDecoderWeights LlaisysQwen2Weights;

#endif

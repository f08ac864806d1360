// The kernels for the CPU, as one library; kernels/cpu_library.py compiles it.
#include "attention.h"
#include "attention_bf16.h"
#include "attention_groups.h"
#include "bfloat16_linear.h"
#include "decoder_layer.h"
#include "draft_layer.h"
#include "gated_activation.h"
#include "int8_linear.h"
#include "linear.h"
#include "lora.h"
#include "matrix.h"
#include "quantized_linear.h"
#include "recurrence.h"
#include "rms_norm.h"
#include "rotary.h"
#include "sampling.h"
#include "selective_scan.h"

ParallelRegion parallel_region = nullptr;

extern "C" void use_parallel_region(ParallelRegion region) { parallel_region = region; }

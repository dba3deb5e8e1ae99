// A kernel like one of a trainer: values[i] += value, enqueued on the stream.
#pragma once

#include "ebb/runtime/device/stream.h"

namespace ebb::testing {

void EnqueueAdd(StreamView stream, float* values, int count, float value);

}  // namespace ebb::testing

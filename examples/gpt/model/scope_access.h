// Gives the layers the addresses of an open scope: where each parameter is, and where to write its
// gradient.
#pragma once

#include "ebb/runtime/engine/scope.h"
#include "ops/ops.h"

namespace ebb::gpt {

struct ScopeParameters {
  const Scope& scope;
  const void* operator()(ParameterId id) const { return scope.parameter(id).data; }
};

struct ScopeGradients {
  BackwardScope& scope;
  Target operator()(ParameterId id) const {
    const BackwardScope::Fused fused = scope.fused_gradient(id);
    return {fused.tensor.data, fused.tensor.dtype, fused.beta};
  }
};

inline TensorView Scalar(const float* value) {
  return {.data = value, .dtype = DType::kFloat32, .shape = {}};
}

}  // namespace ebb::gpt

// A scope is the only way to touch a parameter: it is open from just before a unit's forward or
// backward until just after.
//
// Move-only, default-constructible. Scopes may be open together if ModelSpec::order says so, or if
// parameters are gathered or on their way (ebb.prefetch_depth). Any other is a step error that
// names the scope to close first. Opening never fails: views lead into pools made at Create. On the
// CPU opening waits for data; on a GPU it orders the compute stream. After a failure contents are
// undefined, the first Status sticks, no update passes it, and Finish and Report return it. Close()
// is idempotent; the destructor calls it. After its step a scope's views are empty.
#pragma once

#include <cstdint>
#include <span>

#include "ebb/runtime/engine/tensor_view.h"
#include "ebb/sharding/model.h"

namespace ebb {

class OpenScopes;

class Scope {
 public:
  Scope() = default;
  Scope(Scope&& other) noexcept { *this = static_cast<Scope&&>(other); }
  Scope& operator=(Scope&& other) noexcept;
  ~Scope() { Close(); }

  // The whole parameter in its ParameterSpec::compute, else in the config's compute dtype. The
  // address is the same at every visit, in forward and backward, in every step.
  TensorView parameter(ParameterId p) const;
  // The micro-batches this scope serves: loop over them, always. Numbers within the step, 0 ...
  // StepOptions::micro_batches - 1; in an evaluation within the walk. The span is good until the
  // scope closes.
  std::span<const int> micro_batches() const;
  // The previous visit's output(); also in backward. One dimension of that visit's output_bytes, in
  // the config's compute dtype, or kInt8 where they are no multiple of its size; empty in the first
  // visit and if the trainer keeps its own activations.
  TensorView input(int micro_batch) const;
  // Releases the parameters. A later request for a view is an error of the step. Backward: an
  // unused gradient counts as zero, and the reduction starts.
  void Close();

 protected:
  friend class Steps;
  Scope(OpenScopes* scopes, int64_t id, uint32_t engine)
      : scopes_(scopes), id_(id), engine_(engine) {}
  // Whether views may be asked for. If not, reports a scope that was open earlier in the step.
  bool IsOpen(const char* asked, const ParameterId* of = nullptr) const;

  OpenScopes* scopes_ = nullptr;  // null: closed, or moved from
  int64_t id_ = 0;                // of this opening, never used twice
  uint32_t engine_ = 0;           // ViewOrigin::engine
};

class ForwardScope : public Scope {
 public:
  ForwardScope() = default;
  // Written once; lives until the backward of the next visit has read it. Empty in the last visit.
  MutableTensorView output(int micro_batch);

 private:
  friend class Steps;
  using Scope::Scope;
};

// Parameters and inputs are there too: recompute inside it.
class BackwardScope : public Scope {
 public:
  BackwardScope() = default;
  // ADD into it; zero-filled at the first request of a reduction. It has the communication dtype if
  // each micro-batch is reduced, and the accumulation dtype if several are summed first. If the
  // trainer gives ModelSpec::gradient_dtypes, it has one of those. The communication dtype is the
  // parameter's own (ParameterSpec::compute), unless the config names another.
  MutableTensorView gradient(ParameterId p);
  struct Fused {
    MutableTensorView tensor;
    float beta = 1;
  };
  // Write beta * tensor + g. At the first request beta is 0 and the contents are undefined: for
  // GEMM, without the zero-fill and a read.
  Fused fused_gradient(ParameterId p);
  // Gradients of several parameters of the unit in one call, in the order of `of`; `into` is as
  // long. Adjacent gradients are zero-filled in one go.
  void gradients(std::span<const ParameterId> of, std::span<MutableTensorView> into);
  void fused_gradients(std::span<const ParameterId> of, std::span<Fused> into);
  // The gradient of this visit's output; empty in the last visit.
  TensorView output_gradient(int micro_batch) const;
  // Written once; the next backward reads it. Empty in the first visit of backward.
  MutableTensorView input_gradient(int micro_batch);

 private:
  friend class Steps;
  using Scope::Scope;
};

}  // namespace ebb

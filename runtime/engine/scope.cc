#include "ebb/runtime/engine/scope.h"

#include <algorithm>
#include <utility>

#include "ebb/runtime/engine/steps/open_scopes.h"
#include "ebb/runtime/engine/steps/view_errors.h"

namespace ebb {

Scope& Scope::operator=(Scope&& other) noexcept {
  if (this == &other) return *this;
  Close();
  scopes_ = std::exchange(other.scopes_, nullptr);
  id_ = other.id_;
  engine_ = other.engine_;
  return *this;
}

bool Scope::IsOpen(const char* asked, const ParameterId* of) const {
  if (scopes_ == nullptr && id_ != 0) ReportClosedScope(engine_, id_, asked, of);
  return scopes_ != nullptr;
}

TensorView Scope::parameter(ParameterId p) const {
  return IsOpen("parameter()", &p) ? scopes_->views().Parameter(id_, p) : TensorView{};
}

std::span<const int> Scope::micro_batches() const {
  return IsOpen("micro_batches()") ? scopes_->views().MicroBatches(id_) : std::span<const int>{};
}

TensorView Scope::input(int micro_batch) const {
  return IsOpen("input()") ? TensorView(scopes_->views().Input(id_, micro_batch)) : TensorView{};
}

void Scope::Close() {
  if (scopes_ != nullptr) std::exchange(scopes_, nullptr)->Close(id_);
}

MutableTensorView ForwardScope::output(int micro_batch) {
  return IsOpen("output()") ? scopes_->views().Output(id_, micro_batch) : MutableTensorView{};
}

MutableTensorView BackwardScope::gradient(ParameterId p) {
  return IsOpen("gradient()", &p) ? scopes_->views().Gradient(id_, p, /*zero_fill=*/true).tensor
                                  : MutableTensorView{};
}

BackwardScope::Fused BackwardScope::fused_gradient(ParameterId p) {
  return IsOpen("fused_gradient()", &p) ? scopes_->views().Gradient(id_, p, /*zero_fill=*/false)
                                        : Fused{};
}

void BackwardScope::gradients(std::span<const ParameterId> of, std::span<MutableTensorView> into) {
  std::fill(into.begin(), into.end(), MutableTensorView{});
  if (!IsOpen("gradients()")) return;
  scopes_->views().Gradients(
      id_, of, into.size(), /*zero_fill=*/true,
      [into](size_t i, const Fused& gradient) { into[i] = gradient.tensor; });
}

void BackwardScope::fused_gradients(std::span<const ParameterId> of, std::span<Fused> into) {
  std::fill(into.begin(), into.end(), Fused{});
  if (!IsOpen("fused_gradients()")) return;
  scopes_->views().Gradients(id_, of, into.size(), /*zero_fill=*/false,
                             [into](size_t i, const Fused& gradient) { into[i] = gradient; });
}

TensorView BackwardScope::output_gradient(int micro_batch) const {
  return IsOpen("output_gradient()") ? TensorView(scopes_->views().OutputGradient(id_, micro_batch))
                                     : TensorView{};
}

MutableTensorView BackwardScope::input_gradient(int micro_batch) {
  return IsOpen("input_gradient()") ? scopes_->views().InputGradient(id_, micro_batch)
                                    : MutableTensorView{};
}

}  // namespace ebb

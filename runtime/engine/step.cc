#include "ebb/runtime/engine/step.h"

#include <utility>

#include "ebb/runtime/engine/steps/steps.h"

namespace ebb {
namespace {

absl::Status Moved() {
  return absl::FailedPreconditionError("this Step or Evaluation was moved from, or has finished");
}

}  // namespace

Step& Step::operator=(Step&& other) noexcept {
  if (this == &other) return *this;
  if (steps_ != nullptr) steps_->Drop(number_);
  steps_ = std::exchange(other.steps_, nullptr);
  number_ = other.number_;
  return *this;
}

Step::~Step() {
  if (steps_ != nullptr) steps_->Drop(number_);
}

int Step::rounds() const {
  return steps_ == nullptr ? 0 : steps_->rounds(number_);
}
ForwardScope Step::Forward(UnitId unit) {
  return steps_ == nullptr ? ForwardScope()
                           : steps_->Forward(number_, sharding::ScopeKind::kForward, unit);
}
BackwardScope Step::Backward(UnitId unit) {
  return steps_ == nullptr ? BackwardScope() : steps_->Backward(number_, unit);
}
ForwardScope Step::Recompute(UnitId unit) {
  if (steps_ == nullptr) return ForwardScope();
  return steps_->Forward(number_, sharding::ScopeKind::kRecompute, unit);
}
float Step::loss_scale() const {
  return steps_ == nullptr ? 1 : steps_->LossScale(number_);
}
TensorView Step::device_loss_scale() const {
  return steps_ == nullptr ? TensorView{} : steps_->DeviceLossScale(number_);
}
void Step::AddLoss(TensorView scalar) {
  if (steps_ != nullptr) steps_->Add(number_, /*sum=*/0, scalar);
}
absl::Status Step::Reduce() {
  return steps_ == nullptr ? Moved() : steps_->calls().Returned(steps_->Reduce(number_));
}
absl::Status Step::Finish(const FinishOptions& options) {
  if (steps_ == nullptr) return Moved();
  Steps& steps = *std::exchange(steps_, nullptr);
  return steps.calls().Returned(steps.Finish(number_, options));
}

Evaluation& Evaluation::operator=(Evaluation&& other) noexcept {
  if (this == &other) return *this;
  if (steps_ != nullptr) steps_->Drop(number_);
  steps_ = std::exchange(other.steps_, nullptr);
  number_ = other.number_;
  return *this;
}

Evaluation::~Evaluation() {
  if (steps_ != nullptr) steps_->Drop(number_);
}

ForwardScope Evaluation::Forward(UnitId unit) {
  return steps_ == nullptr ? ForwardScope()
                           : steps_->Forward(number_, sharding::ScopeKind::kForward, unit);
}
void Evaluation::Add(int sum, TensorView scalar) {
  if (steps_ != nullptr) steps_->Add(number_, sum, scalar);
}
void Evaluation::Fail(const absl::Status& error) {
  if (steps_ != nullptr) steps_->FailEvaluation(number_, error);
}
absl::StatusOr<double> Evaluation::Finish() {
  const absl::StatusOr<Sums> sums = FinishSums();
  if (!sums.ok()) return sums.status();
  return sums->front().mean();
}
absl::StatusOr<Evaluation::Sums> Evaluation::FinishSums() {
  if (steps_ == nullptr) return Moved();
  Steps& steps = *std::exchange(steps_, nullptr);
  return steps.calls().Returned(steps.FinishEvaluation(number_));
}

}  // namespace ebb

#include "ebb/runtime/engine/step.h"

#include <utility>

#include "ebb/runtime/engine/executor.h"

namespace ebb {
namespace {

absl::Status Moved() {
  return absl::FailedPreconditionError("this Step or Evaluation was moved from, or has finished");
}

}  // namespace

Step& Step::operator=(Step&& other) noexcept {
  if (this == &other) return *this;
  if (executor_ != nullptr) executor_->Drop(number_);
  executor_ = std::exchange(other.executor_, nullptr);
  number_ = other.number_;
  return *this;
}

Step::~Step() {
  if (executor_ != nullptr) executor_->Drop(number_);
}

int Step::rounds() const {
  return executor_ == nullptr ? 0 : executor_->rounds(number_);
}
ForwardScope Step::Forward(UnitId unit) {
  return executor_ == nullptr ? ForwardScope() : executor_->OpenForward(number_, unit);
}
BackwardScope Step::Backward(UnitId unit) {
  return executor_ == nullptr ? BackwardScope() : executor_->OpenBackward(number_, unit);
}
ForwardScope Step::Recompute(UnitId unit) {
  return executor_ == nullptr ? ForwardScope() : executor_->OpenRecompute(number_, unit);
}
float Step::loss_scale() const {
  return executor_ == nullptr ? 1 : executor_->LossScale(number_);
}
TensorView Step::device_loss_scale() const {
  return executor_ == nullptr ? TensorView{} : executor_->DeviceLossScale(number_);
}
void Step::AddLoss(TensorView scalar) {
  if (executor_ != nullptr) executor_->Add(number_, /*sum=*/0, scalar);
}
absl::Status Step::Reduce() {
  return executor_ == nullptr ? Moved() : executor_->calls().Returned(executor_->Reduce(number_));
}
absl::Status Step::Finish(const FinishOptions& options) {
  if (executor_ == nullptr) return Moved();
  Executor& executor = *std::exchange(executor_, nullptr);
  return executor.calls().Returned(executor.Finish(number_, options));
}

Evaluation& Evaluation::operator=(Evaluation&& other) noexcept {
  if (this == &other) return *this;
  if (executor_ != nullptr) executor_->Drop(number_);
  executor_ = std::exchange(other.executor_, nullptr);
  number_ = other.number_;
  return *this;
}

Evaluation::~Evaluation() {
  if (executor_ != nullptr) executor_->Drop(number_);
}

ForwardScope Evaluation::Forward(UnitId unit) {
  return executor_ == nullptr ? ForwardScope() : executor_->OpenForward(number_, unit);
}
void Evaluation::Add(int sum, TensorView scalar) {
  if (executor_ != nullptr) executor_->Add(number_, sum, scalar);
}
absl::StatusOr<double> Evaluation::Finish() {
  const absl::StatusOr<Sums> sums = FinishSums();
  if (!sums.ok()) return sums.status();
  return sums->front().mean();
}
absl::StatusOr<Evaluation::Sums> Evaluation::FinishSums() {
  if (executor_ == nullptr) return Moved();
  Executor& executor = *std::exchange(executor_, nullptr);
  return executor.calls().Returned(executor.FinishEvaluation(number_));
}

}  // namespace ebb

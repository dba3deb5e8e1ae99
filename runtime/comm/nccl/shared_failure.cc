#include "ebb/runtime/comm/nccl/shared_failure.h"

#include <utility>

namespace ebb {

std::shared_ptr<SharedFailure> SharedFailure::Between(std::shared_ptr<Bootstrap> bootstrap) {
  std::shared_ptr<SharedFailure> shared(new SharedFailure(std::move(bootstrap)));
  // The bootstrap may live on, and hear something, when the world is gone.
  shared->bootstrap_->OnFailure([weak = std::weak_ptr(shared->heard_)](const absl::Status& why) {
    if (const auto alive = weak.lock()) alive->FailAll(why);
  });
  return shared;
}

void SharedFailure::Join(const std::shared_ptr<NcclChannel>& channel) {
  {
    const std::scoped_lock lock(heard_->mutex);
    if (heard_->status.ok()) {
      std::erase_if(heard_->channels, [](const auto& old) { return old.expired(); });
      heard_->channels.push_back(channel);
      return;
    }
  }
  channel->Fail(status());
}

void SharedFailure::Report(const absl::Status& why) {
  if (heard_->FailAll(why)) bootstrap_->Fail(why);
}

bool SharedFailure::Heard::FailAll(const absl::Status& why) {
  std::vector<std::shared_ptr<NcclChannel>> failing;
  {
    const std::scoped_lock lock(mutex);
    if (!status.ok()) return false;
    status = why;
    for (const auto& weak : channels) {
      if (auto channel = weak.lock()) failing.push_back(std::move(channel));
    }
  }
  // All before any is let go of, whose end may wait for the others' kernels.
  for (const auto& channel : failing) channel->Fail(why);
  return true;
}

absl::Status SharedFailure::status() const {
  const std::scoped_lock lock(heard_->mutex);
  return heard_->status;
}

}  // namespace ebb

#include "ebb/runtime/comm/nccl/failures.h"

#include <utility>

namespace ebb {

std::shared_ptr<NcclFailures> NcclFailures::Of(std::shared_ptr<Store> store) {
  std::shared_ptr<NcclFailures> failures(new NcclFailures(std::move(store)));
  // The store may outlive the world, and report a failure then.
  const std::weak_ptr<Heard> weak = failures->heard_;
  failures->store_->OnFailure([weak](const absl::Status& why) {
    if (const auto alive = weak.lock()) alive->FailAll(why);
  });
  return failures;
}

void NcclFailures::Join(const std::shared_ptr<NcclChannel>& channel) {
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

void NcclFailures::Report(const absl::Status& why) {
  if (heard_->FailAll(why)) store_->Fail(why);
}

bool NcclFailures::Heard::FailAll(const absl::Status& why) {
  std::vector<std::shared_ptr<NcclChannel>> failing;
  {
    const std::scoped_lock lock(mutex);
    if (!status.ok()) return false;
    status = why;
    for (const auto& weak : channels) {
      if (auto channel = weak.lock()) failing.push_back(std::move(channel));
    }
  }
  // Every channel fails before any of them is freed, because that may wait for kernels of the
  // others.
  for (const auto& channel : failing) channel->Fail(why);
  return true;
}

absl::Status NcclFailures::status() const {
  const std::scoped_lock lock(heard_->mutex);
  return heard_->status;
}

}  // namespace ebb

#include "thread_ranks.h"

#include <chrono>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/nccl/nccl_world.h"
#include "ebb/runtime/device/device.h"

namespace ebb::testing {

class ThreadMeeting::Member : public Bootstrap {
 public:
  Member(ThreadMeeting& meeting, int rank)
      : meeting_(meeting),
        rank_(rank),
        notes_(std::make_shared<FarewellNotes>(
            [&meeting, rank](std::string_view note) { meeting.PassOn(rank, note); })) {}
  int rank() const override { return rank_; }
  int size() const override { return meeting_.size_; }
  int local_rank() const override { return rank_; }
  int local_size() const override { return meeting_.size_; }
  int ranks_per_host() const override { return meeting_.size_; }
  absl::StatusOr<std::vector<std::string>> AllGather(std::string_view mine,
                                                     double timeout_seconds) override {
    return meeting_.AllGather(rank_, mine, timeout_seconds);
  }
  void Fail(const absl::Status& why) override { meeting_.Fail(rank_, why); }
  void OnFailure(std::function<void(const absl::Status&)> heard) override {
    meeting_.Listen(rank_, std::move(heard));
  }
  absl::StatusOr<std::unique_ptr<Farewells>> NewFarewells(double /*timeout_seconds*/) override {
    return notes_->New();
  }
  const std::shared_ptr<FarewellNotes>& notes() const { return notes_; }

 private:
  ThreadMeeting& meeting_;
  const int rank_;
  const std::shared_ptr<FarewellNotes> notes_;
};

std::shared_ptr<Bootstrap> ThreadMeeting::For(int rank) {
  auto member = std::make_shared<Member>(*this, rank);
  const std::scoped_lock lock(mutex_);
  notes_[static_cast<size_t>(rank)] = member->notes();
  return member;
}

void ThreadMeeting::PassOn(int rank, std::string_view note) {
  std::vector<std::shared_ptr<FarewellNotes>> others;
  {
    const std::scoped_lock lock(mutex_);
    for (size_t other = 0; other < notes_.size(); ++other) {
      auto alive = notes_[other].lock();
      if (static_cast<int>(other) != rank && alive != nullptr) others.push_back(std::move(alive));
    }
  }
  for (const auto& other : others) other->Hear(note);
}

absl::StatusOr<std::vector<std::string>> ThreadMeeting::AllGather(int rank, std::string_view mine,
                                                                  double timeout_seconds) {
  std::unique_lock lock(mutex_);
  Round& round = rounds_[joined_[rank]++];
  round.texts[rank] = std::string(mine);
  changed_.notify_all();
  const auto complete = [&] { return static_cast<int>(round.texts.size()) == size_; };
  const bool ended = changed_.wait_for(lock, std::chrono::duration<double>(timeout_seconds),
                                       [&] { return complete() || !failure_.ok(); });
  if (!complete() && ended) return failure_;
  if (!complete()) {
    for (int other = 0; other < size_; ++other) {
      if (round.texts.count(other) > 0) continue;
      failure_ = absl::DeadlineExceededError(
          absl::StrCat("rank ", other, " has not come within ", timeout_seconds, " s"));
      changed_.notify_all();
      return failure_;
    }
  }
  std::vector<std::string> texts;
  for (const auto& [other, text] : round.texts) texts.push_back(text);
  return texts;
}

void ThreadMeeting::Fail(int rank, const absl::Status& why) {
  std::vector<std::function<void(const absl::Status&)>> others;
  {
    const std::scoped_lock lock(mutex_);
    if (!failure_.ok()) return;
    failure_ = why;
    for (size_t other = 0; other < listeners_.size(); ++other) {
      if (static_cast<int>(other) != rank && listeners_[other]) others.push_back(listeners_[other]);
    }
    changed_.notify_all();
  }
  for (const auto& heard : others) heard(why);
}

void ThreadMeeting::Listen(int rank, std::function<void(const absl::Status&)> heard) {
  absl::Status already;
  {
    const std::scoped_lock lock(mutex_);
    listeners_[static_cast<size_t>(rank)] = heard;
    already = failure_;
  }
  if (!already.ok()) heard(already);
}

void ThreadMeeting::End(int rank) {
  Fail(rank, absl::UnavailableError(absl::StrCat("rank ", rank, " has ended")));
}

absl::Status RunOnGpus(int ranks, int devices, std::function<absl::Status(World)> body) {
  ThreadMeeting meeting(ranks);
  std::vector<absl::Status> results(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      absl::Status& result = results[static_cast<size_t>(rank)];
      auto device = Device::Cuda(rank % devices);
      result = device.status();
      if (!result.ok()) return meeting.End(rank);
      auto world = NewNcclWorld(meeting.For(rank), *device);
      result = world.status();
      if (!result.ok()) return meeting.End(rank);
      result = body(World(*std::move(world)));
      if (!result.ok()) meeting.End(rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& result : results) {
    if (!result.ok()) return result;
  }
  return absl::OkStatus();
}

absl::Status RunOnGpu(int ranks, std::function<absl::Status(World)> body) {
  return RunOnGpus(ranks, /*devices=*/1, std::move(body));
}

}  // namespace ebb::testing

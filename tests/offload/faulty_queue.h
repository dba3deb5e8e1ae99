// Between a shard file's transfers and the queue that serves them. It answers in the system's
// place, as a test wants.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "ebb/offload/io_queue.h"
#include "ebb/offload/shard_file.h"

namespace ebb::testing {

class FaultyQueue final : public IoQueue, public IoListener {
 public:
  // Returns the answer in the system's place, or nothing; may shorten the request. One request at a
  // time.
  using Fault = std::function<std::optional<int64_t>(IoRequest&)>;

  // `hold`: completions are held until there are so many, then reported latest first. kAllInFlight:
  // until all in flight are held.
  static constexpr size_t kAllInFlight = ~size_t{0};
  // `own_thread`: as IoQueueOptions; false: Drive gives the answers.
  FaultyQueue(IoListener& listener, Fault fault, size_t hold, bool own_thread);
  ~FaultyQueue() override;

  absl::Status Make(const ShardFile::Options::MakeQueue& make);
  void Submit(std::span<IoRequest* const> requests) override;
  bool Drive() override;
  void Completed(std::span<const IoCompletion> completions) override;
  void Announce() override { listener_.Announce(); }
  std::string description() const override { return inner_->description(); }

 private:
  void Answer();
  bool GiveAnswers(std::unique_lock<std::mutex>& lock);
  void Complete(std::vector<IoCompletion> completions);

  IoListener& listener_;
  const Fault fault_;
  const size_t hold_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<IoRequest*, int64_t> whole_bytes_;  // of shortened requests
  std::vector<IoCompletion> answers_;
  std::vector<IoCompletion> held_;
  size_t in_flight_ = 0;
  bool stopping_ = false, answering_ = false;
  std::thread answerer_;
  std::unique_ptr<IoQueue> inner_;
  IoQueue* serving_ = nullptr;  // inner_: for its threads, which still run while inner_ is reset
};

// For ShardFile::Options::wrap_queue.
inline auto WithFaults(FaultyQueue::Fault fault, size_t hold = 1, bool own_thread = true) {
  return
      [fault = std::move(fault), hold, own_thread](
          IoListener& listener,
          const ShardFile::Options::MakeQueue& make) -> absl::StatusOr<std::unique_ptr<IoQueue>> {
        auto queue = std::make_unique<FaultyQueue>(listener, fault, hold, own_thread);
        if (absl::Status made = queue->Make(make); !made.ok()) return made;
        return queue;
      };
}

}  // namespace ebb::testing

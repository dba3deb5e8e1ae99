#include "ebb/runtime/comm/nccl/world_bootstrap.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/device/thread_limit.h"

namespace ebb {
namespace {

// How late a failure of the world may be noticed by ranks that only use their GPUs.
constexpr std::chrono::milliseconds kWatchPeriod{50};

// Every rank's `count` bytes, one after the other.
absl::StatusOr<std::string> GatherBytes(Communicator& communicator, const void* mine,
                                        size_t count) {
  std::string all(count * static_cast<size_t>(communicator.size()), '\0');
  Stream stream = Device::Cpu(1).CallerStream();
  const CollectiveSpan span = {
      .send = mine, .receive = all.data(), .count = static_cast<int64_t>(count)};
  EBB_RETURN_IF_ERROR(communicator.AllGather(stream, {&span, 1}, DType::kInt8));
  EBB_RETURN_IF_ERROR(communicator.status());
  return all;
}

// A communicator on which nothing runs, so that its only failure, but for the world's, is the one
// that the first rank which leaves brings about.
class FarewellsOfCommunicator : public Farewells {
 public:
  explicit FarewellsOfCommunicator(Communicator beside) : beside_(std::move(beside)) {}

  void Say(const Farewell& mine) override {
    beside_.Abort(absl::CancelledError(absl::StrCat(kMark, mine.calls, " ", mine.rank)));
  }

  std::optional<Farewell> First() override {
    const absl::Status status = beside_.status();
    absl::string_view said = status.message();
    const size_t mark = said.rfind(kMark);
    if (mark == absl::string_view::npos) return std::nullopt;  // also if nothing has failed
    said.remove_prefix(mark + kMark.size());
    const size_t space = std::min(said.find(' '), said.size());
    Farewell farewell = {.rank = std::string(said.substr(std::min(space + 1, said.size())))};
    if (!absl::SimpleAtoi(said.substr(0, space), &farewell.calls)) return std::nullopt;
    return farewell;
  }

  absl::StatusOr<std::unique_ptr<Farewells>> Split(int colour, int key) override {
    EBB_ASSIGN_OR_RETURN(Communicator part, beside_.Split(colour, key));
    return std::make_unique<FarewellsOfCommunicator>(std::move(part));
  }

 private:
  static constexpr absl::string_view kMark = "farewell after ";

  Communicator beside_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<WorldBootstrap>> WorldBootstrap::Create(World world) {
  EBB_ASSIGN_OR_RETURN(Communicator watched, world.NewCommunicator({.name = "gpu-watch"}));
  std::shared_ptr<WorldBootstrap> bootstrap(
      new WorldBootstrap(std::move(world), std::move(watched)));
  try {
    bootstrap->watcher_ = std::thread([b = bootstrap.get()] { b->Watch(); });
  } catch (const std::system_error& error) {
    return NoThread("no thread to watch the other ranks", error);
  }
  pthread_setname_np(bootstrap->watcher_.native_handle(), "ebb-gpu-watch");
  return bootstrap;
}

WorldBootstrap::~WorldBootstrap() {
  {
    const std::scoped_lock lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  if (watcher_.joinable()) watcher_.join();
}

absl::StatusOr<std::vector<std::string>> WorldBootstrap::AllGather(std::string_view mine,
                                                                   double timeout_seconds) {
  EBB_ASSIGN_OR_RETURN(
      Communicator communicator,
      world_.NewCommunicator({.name = "gpu-bootstrap", .timeout_seconds = timeout_seconds}));
  const size_t ranks = static_cast<size_t>(size());
  const uint64_t own_length = mine.size();
  EBB_ASSIGN_OR_RETURN(const std::string packed,
                       GatherBytes(communicator, &own_length, sizeof(own_length)));
  std::vector<uint64_t> lengths(ranks);
  std::copy_n(packed.data(), packed.size(), reinterpret_cast<char*>(lengths.data()));
  const size_t longest = *std::max_element(lengths.begin(), lengths.end());
  std::string padded(mine);
  padded.resize(longest);
  EBB_ASSIGN_OR_RETURN(const std::string all, GatherBytes(communicator, padded.data(), longest));
  std::vector<std::string> texts;
  for (size_t rank = 0; rank < ranks; ++rank)
    texts.push_back(all.substr(rank * longest, lengths[rank]));
  return texts;
}

void WorldBootstrap::OnFailure(std::function<void(const absl::Status& why)> heard) {
  const std::scoped_lock lock(mutex_);
  heard_ = std::move(heard);
  changed_.notify_all();
}

absl::StatusOr<std::unique_ptr<Farewells>> WorldBootstrap::NewFarewells(double timeout_seconds) {
  EBB_ASSIGN_OR_RETURN(
      Communicator beside,
      world_.NewCommunicator({.name = "gpu-farewells", .timeout_seconds = timeout_seconds}));
  return std::make_unique<FarewellsOfCommunicator>(std::move(beside));
}

void WorldBootstrap::Watch() {
  std::unique_lock lock(mutex_);
  while (!closing_) {
    if (const absl::Status failed = watched_.status(); !failed.ok() && heard_ != nullptr) {
      const auto heard = std::move(heard_);
      lock.unlock();
      heard(failed);
      return;
    }
    changed_.wait_for(lock, kWatchPeriod);
  }
}

}  // namespace ebb

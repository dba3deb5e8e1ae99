#include "stop.h"

#include <atomic>
#include <csignal>
#include <utility>

#include "absl/strings/str_cat.h"
#include "report/standard_output.h"
#include "status_macros.h"

namespace ebb::gpt {
namespace {

std::atomic<int> signal_seen{0};  // its number

// Votes; the highest one counts. A signal's number lies between these two.
constexpr float kGoOn = 0, kOutputFailed = 1000;

float Vote() {
  if (!OutputError().ok()) return kOutputFailed;
  return static_cast<float>(signal_seen.load(std::memory_order_relaxed));
}

void Remember(int signal) {
  signal_seen.store(signal, std::memory_order_relaxed);
  std::signal(signal, SIG_DFL);
}

// The write that raises the signal fails, and so do all later writes.
void RememberClosedOutput(int signal) {
  signal_seen.store(signal, std::memory_order_relaxed);
}

// A signal that the parent has switched off, as nohup does, stays off.
void CatchUnlessIgnored(int signal, void (*handler)(int)) {
  if (std::signal(signal, handler) == SIG_IGN) std::signal(signal, SIG_IGN);
}

}  // namespace

void CatchStopSignals(bool before_time_is_up) {
  std::signal(SIGINT, Remember);
  std::signal(SIGTERM, Remember);
  if (before_time_is_up) std::signal(SIGUSR1, Remember);
  CatchUnlessIgnored(SIGHUP, Remember);
  CatchUnlessIgnored(SIGPIPE, RememberClosedOutput);
}

// In this order: the stream is destroyed first, and so its queue is empty before its work's data
// are destroyed.
struct StopVote::State {
  State(World w, Communicator c, Stream s)
      : world(std::move(w)), communicator(std::move(c)), stream(std::move(s)) {}
  const World world;
  float vote = kGoOn;
  bool stopped = false;
  const CollectiveSpan span = {.send = &vote, .receive = &vote, .count = 1};
  Communicator communicator;
  Stream stream;
};

StopVote::StopVote(std::unique_ptr<State> state) : state_(std::move(state)) {}
StopVote::StopVote(StopVote&&) noexcept = default;
StopVote::~StopVote() = default;

absl::StatusOr<StopVote> StopVote::Create(const World& world, const Device& device,
                                          double timeout_seconds) {
  GPT_ASSIGN_OR_RETURN(
      Communicator communicator,
      world.NewCommunicator({.name = "gpt-stop", .timeout_seconds = timeout_seconds}));
  GPT_ASSIGN_OR_RETURN(Stream stream, device.NewStream("gpt-stop"));
  return StopVote(std::make_unique<State>(world, std::move(communicator), std::move(stream)));
}

bool StopVote::stopped() const {
  return state_->stopped;
}

bool StopVote::output_failed() const {
  return state_->stopped && state_->vote == kOutputFailed;
}

std::string StopVote::stopped_by() const {
  if (!state_->stopped) return "";
  if (output_failed()) return "standard output, which cannot be written";
  switch (const int signal = static_cast<int>(state_->vote)) {
    case SIGINT:
      return "SIGINT";
    case SIGTERM:
      return "SIGTERM";
    case SIGHUP:
      return "SIGHUP";
    case SIGUSR1:
      return "SIGUSR1";
    case SIGPIPE:
      return "SIGPIPE";
    default:
      return absl::StrCat("signal ", signal);
  }
}

absl::Status StopVote::Meet() {
  GPT_RETURN_IF_ERROR(state_->communicator.Barrier(state_->stream));
  state_->stream.WaitIdle();
  return state_->communicator.status();
}

absl::Status StopVote::Decide() {
  if (state_->stopped) return absl::OkStatus();
  state_->stream.WaitIdle();
  if (absl::Status lost = state_->communicator.status(); !lost.ok()) {
    state_->world.Fail(lost);
    return lost;
  }
  state_->stopped = state_->vote != kGoOn;
  if (state_->stopped) return absl::OkStatus();
  state_->vote = Vote();
  return state_->communicator.AllReduce(state_->stream, {&state_->span, 1}, DType::kFloat32,
                                        ReduceOp::kMax);
}

}  // namespace ebb::gpt

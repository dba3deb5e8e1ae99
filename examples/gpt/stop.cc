#include "stop.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "report/output.h"
#include "status_macros.h"

namespace ebb::gpt {
namespace {

std::atomic<int> signal_seen{0};         // the first one's number
std::atomic<int64_t> signal_seen_ns{0};  // its time by a steady clock

// Votes; the highest one counts. A signal's number lies between these two.
constexpr float kGoOn = 0, kOutputFailed = 1000;

float Vote() {
  if (!OutputError().ok()) return kOutputFailed;
  return static_cast<float>(signal_seen.load());
}

// A step may take long, and nothing else shows that the signal has come.
void Say(std::string_view line) {
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, line.data(), line.size());
}

// Calls only what a signal handler may call.
void Remember(int signal, siginfo_t* info, void*) {
  const int error = errno;
  const int64_t now =
      std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
  int64_t first = 0;
  if (signal_seen_ns.compare_exchange_strong(first, now)) {
    signal_seen.store(signal);
    if (signal == SIGINT && info->si_code == SI_KERNEL)
      Say("\ngpt: ends after this step; Ctrl-C again ends it at once, and nothing is saved\n");
  } else if (EndsAtOnce(now - first, signal, info->si_code)) {
    Say("\ngpt: ended by a second Ctrl-C; nothing was saved\n");
    ::signal(signal, SIG_DFL);
    raise(signal);  // acts when this handler returns
  }
  errno = error;
}

std::atomic<int> exit_code_before_training{0};

// Calls only what a signal handler may call.
void End(int signal, siginfo_t*, void*) {
  Say("gpt: stopped by SIG");
  Say(sigabbrev_np(signal));
  Say(" before training began\n");
  _exit(exit_code_before_training);
}

enum class IfIgnored : uint8_t { kCatch, kLeave };
using Handler = void (*)(int, siginfo_t*, void*);

void Catch(int signal, IfIgnored if_ignored, Handler handler) {
  struct sigaction before = {};
  // A signal that the parent has switched off, as nohup does, stays off.
  sigaction(signal, nullptr, &before);
  if (before.sa_handler == SIG_IGN && if_ignored == IfIgnored::kLeave) return;
  struct sigaction action = {};
  action.sa_sigaction = handler;
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  sigaction(signal, &action, nullptr);
}

void CatchAll(Handler handler, bool before_time_is_up) {
  Catch(SIGINT, IfIgnored::kCatch, handler);
  Catch(SIGTERM, IfIgnored::kCatch, handler);
  if (before_time_is_up) {
    for (const int signal : {SIGUSR1, SIGUSR2, SIGXCPU}) Catch(signal, IfIgnored::kCatch, handler);
  }
  Catch(SIGHUP, IfIgnored::kLeave, handler);
  Catch(SIGPIPE, IfIgnored::kLeave, handler);
}

}  // namespace

bool EndsAtOnce(int64_t nanoseconds_since_first, int signal, int code) {
  constexpr int64_t kPressedTwice = 2'000'000'000;
  return signal == SIGINT && code == SI_KERNEL && nanoseconds_since_first >= kPressedTwice;
}

void EndOnStopSignals(int exit_code, bool before_time_is_up) {
  exit_code_before_training = exit_code;
  CatchAll(End, before_time_is_up);
}

void CatchStopSignals(bool before_time_is_up) {
  CatchAll(Remember, before_time_is_up);
}

absl::StatusOr<std::unique_ptr<StopVote>> StopVote::Create(const World& world, const Device& device,
                                                           double timeout_seconds) {
  GPT_ASSIGN_OR_RETURN(
      Communicator communicator,
      world.NewCommunicator({.name = "gpt-stop", .timeout_seconds = timeout_seconds}));
  GPT_ASSIGN_OR_RETURN(Stream stream, device.NewStream("gpt-stop"));
  return std::unique_ptr<StopVote>(new StopVote(world, std::move(communicator), std::move(stream)));
}

bool StopVote::output_failed() const {
  return stopped_ && vote_ == kOutputFailed;
}

std::string StopVote::stopped_by() const {
  if (!stopped_) return "";
  if (output_failed()) return "output that cannot be written";
  return absl::StrCat("SIG", sigabbrev_np(static_cast<int>(vote_)));
}

absl::Status StopVote::Meet() {
  GPT_RETURN_IF_ERROR(communicator_.Barrier(stream_));
  stream_.WaitIdle();
  return communicator_.status();
}

absl::Status StopVote::Decide() {
  if (stopped_) return absl::OkStatus();
  stream_.WaitIdle();
  if (absl::Status lost = communicator_.status(); !lost.ok()) {
    world_.Fail(lost);
    return lost;
  }
  stopped_ = vote_ != kGoOn;
  if (stopped_) return absl::OkStatus();
  vote_ = Vote();
  return communicator_.AllReduce(stream_, {&span_, 1}, DType::kFloat32, ReduceOp::kMax);
}

}  // namespace ebb::gpt

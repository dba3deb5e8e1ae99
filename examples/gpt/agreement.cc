#include "agreement.h"

#include <array>
#include <vector>

#include "absl/strings/str_cat.h"
#include "report/digest.h"
#include "status_macros.h"

namespace ebb::gpt {
namespace {

struct Entry {
  const char* option;
  uint64_t value;
};
constexpr size_t kEntries = 20;
using Entries = std::array<Entry, kEntries>;

Entries EntriesOf(const Run& run) {
  const Options& o = run.options;
  const GptShape& s = o.shape;
  const auto number = [](int64_t value) { return static_cast<uint64_t>(value); };
  return {Entry{"--layers", number(s.layers)},
          {"--heads", number(s.heads)},
          {"--width", number(s.width)},
          {"--context", number(s.context)},
          {"--vocabulary", number(s.vocabulary)},
          {"--data (the bytes of the files)", run.text.fingerprint()},
          {"--seed", o.seed},
          {"--steps", number(o.steps)},
          {"--save", Hasher().Add(o.save_folder).hash()},
          {"--save-every", number(o.save_every)},
          {"--resume", Hasher().Add(o.resume).hash()},
          {"--init-from", Hasher().Add(o.init_from).hash()},
          {"--export", Hasher().Add(o.export_folder).hash()},
          {"--evaluate-every", number(o.evaluate_every)},
          {"--sample", number(o.sample_bytes.value_or(-1))},
          {"--prompt", Hasher().Add(o.prompt).hash()},
          {"--sequence-parallel", o.sequence_parallel},
          {"--products", Hasher().Add(o.products).hash()},
          {"--summary (given or not)", !o.summary_file.empty()},
          {"--device", Hasher().Add(o.device).hash()}};
}

}  // namespace

absl::Status GatherBytes(const World& world, const char* name, double timeout_seconds,
                         const void* own, int64_t bytes, void* all) {
  GPT_ASSIGN_OR_RETURN(Communicator communicator,
                       world.NewCommunicator({.name = name, .timeout_seconds = timeout_seconds}));
  Stream stream = Device::Cpu(1).CallerStream();
  const CollectiveSpan span = {.send = own, .receive = all, .count = bytes};
  GPT_RETURN_IF_ERROR(communicator.AllGather(stream, {&span, 1}, DType::kInt8));
  return communicator.status();
}

absl::Status AgreeOnRun(const World& world, const Run& run) {
  const Entries own = EntriesOf(run);
  GPT_ASSIGN_OR_RETURN(const auto all,
                       GatherOnHost(world, "gpt-agreement", run.config.ebb.timeout_seconds, own));
  for (size_t i = 0; i < kEntries; ++i) {
    for (size_t rank = 1; rank < all.size(); ++rank) {
      if (all[rank][i].value == all[0][i].value) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          "ranks have different options: ", own[i].option, " differs between rank 0 and rank ",
          rank, "; start every rank with the same options and data"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> TextOfFirst(const World& world, const std::string& text,
                                        double timeout_seconds) {
  std::array<char, kTextMax + 1> own = {};
  text.copy(own.data(), kTextMax);
  GPT_ASSIGN_OR_RETURN(const auto all, GatherOnHost(world, "gpt-text", timeout_seconds, own));
  return all.front().data();
}

}  // namespace ebb::gpt

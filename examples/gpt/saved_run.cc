#include "saved_run.h"

#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/trace/log.h"
#include "refusal.h"

namespace ebb::gpt {
namespace {

constexpr char kText[] = "text fingerprint", kSeed[] = "seed", kTokens[] = "tokens per step";

std::map<std::string, std::string> OwnValues(const Trainer& trainer, const Run& run) {
  return {{kText, absl::StrCat(run.text.fingerprint())},
          {kSeed, absl::StrCat(run.options.seed)},
          {kTokens, absl::StrCat(trainer.tokens_per_step())}};
}

}  // namespace

absl::StatusOr<int64_t> Resume(Trainer& trainer, const Run& run) {
  const Options& options = run.options;
  if (options.resume.empty()) return 0;
  const bool latest = options.resume == Options::kLatest;
  const absl::StatusOr<LoadedCheckpoint> loaded =
      LoadCheckpoint(trainer.engine(), latest ? options.save_folder : options.resume);
  if (latest && absl::IsNotFound(loaded.status())) return 0;
  if (!loaded.ok()) {
    return RefusalByCode(
        absl::Status(loaded.status().code(),
                     absl::StrCat("--resume ", options.resume, ": ", loaded.status().message())));
  }
  const int64_t finished = loaded->state.finished_steps;
  if (trainer.world().rank() != 0) return finished;
  LogInfo(absl::StrCat("resumed from '", loaded->path, "', after step ", finished));
  for (const auto& [name, value] : OwnValues(trainer, run)) {
    const auto saved = loaded->trainer.find(name);
    if (saved == loaded->trainer.end() || saved->second == value) continue;
    LogWarning(absl::StrCat("the run that saved '", loaded->path, "' had another ", name, " (",
                            saved->second, ", now ", value,
                            "): its losses will not be those of one run"));
  }
  return finished;
}

absl::Status Saves::Begin() {
  EBB_RETURN_IF_ERROR(End());
  EBB_ASSIGN_OR_RETURN(SaveTicket ticket, SaveAsync(trainer_.engine(), run_.options.save_folder,
                                                    {.keep = static_cast<int>(run_.options.keep),
                                                     .trainer = OwnValues(trainer_, run_)}));
  ticket_.emplace(std::move(ticket));
  shown_ = false;
  return absl::OkStatus();
}

absl::Status Saves::End() {
  return ticket_.has_value() ? ticket_->Wait().status() : absl::OkStatus();
}

std::string Saves::TakeEnded() {
  if (shown_ || !ticket_.has_value() || !ticket_->Done()) return "";
  shown_ = true;
  return ticket_->Wait().value_or("");
}

}  // namespace ebb::gpt

#include "report/run_report.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "command_line/configuration.h"
#include "report/digest.h"
#include "report/traffic.h"
#include "status_macros.h"

namespace ebb::gpt {
namespace {

CurveTitle TitleOf(const Run& run, const Trainer& trainer, const Config& config) {
  const GptShape& shape = run.options.shape;
  const std::vector<std::string>& data = run.options.data;
  const std::string more = data.size() > 1 ? absl::StrCat(" and ", data.size() - 1, " more") : "";
  return {.model = absl::StrFormat(
              "GPT, %.2f M parameters: %d layers, %d heads, width %d, context %d, %s",
              static_cast<double>(ParametersOf(trainer.model())) / 1e6, shape.layers, shape.heads,
              shape.width, shape.context, std::string(Name(config.compute))),
          .data = absl::StrCat(run.text.training_bytes(), " bytes of ",
                               data.empty() ? "text" : data.front(), more)};
}

absl::Status WriteReports(const Run& run, Trainer& trainer, const History& history,
                          const Summary& summary) {
  if (run.reports.curve) {
    const CurveTitle title = TitleOf(run, trainer, trainer.engine().config());
    GPT_RETURN_IF_ERROR(run.reports.curve->Write(CurveSvg(history, title)));
  }
  if (run.reports.summary)
    GPT_RETURN_IF_ERROR(run.reports.summary->Write(SummaryJson(summary, history)));
  return absl::OkStatus();
}

}  // namespace

std::string Headline(Trainer& trainer, const Run& run, const std::string& how) {
  const Config& config = trainer.engine().config();
  return absl::StrFormat(
      "%.2f M parameters, %d %s (%s), stage %d, %s, %d tokens a step, %d bytes of text, %s%s",
      static_cast<double>(ParametersOf(trainer.model())) / 1e6, run.options.ranks,
      run.options.ranks == 1 ? "rank" : "ranks", trainer.device().description(), config.zero.stage,
      std::string(Name(config.compute)), trainer.tokens_per_step(), run.text.training_bytes(),
      RatesText(config), how.empty() ? "" : ", " + how);
}

absl::StatusOr<Summary> Summarize(const World& world, const Run& run, Trainer& trainer,
                                  const History& history) {
  Engine& engine = trainer.engine();
  GPT_ASSIGN_OR_RETURN(RankUsage usage, FullestRank(world, engine, history.traffic));
  std::string digest;
  if (!run.options.summary_file.empty()) {
    GPT_ASSIGN_OR_RETURN(digest, DigestOf(engine, trainer.model(), world.rank()));
  }
  return Summary{.config_json = engine.config().ToJson(),
                 .version = EBB_VERSION,
                 .parameters = ParametersOf(trainer.model()),
                 .ranks = run.options.ranks,
                 .usage = std::move(usage),
                 .plan_operations = engine.program().operations(),
                 .plan_bytes = engine.program().own_bytes(),
                 .resident = run.resident.Row(),
                 .graphs = trainer.graphs(),
                 .products = trainer.product_letters(),
                 .parameter_digest = std::move(digest)};
}

absl::Status ReportRun(const Run& run, Trainer& trainer, const History& history,
                       const Summary& summary, Progress& progress) {
  GPT_RETURN_IF_ERROR(WriteReports(run, trainer, history, summary));
  const RankUsage& usage = summary.usage;
  progress.Say("\nMemory of the fullest rank\n" + MemoryTable(usage.memory));
  if (!usage.traffic.empty()) {
    const int64_t own = ParametersOf(trainer.model()) / trainer.engine().program().shards();
    progress.Say((history.traffic_is_steady
                      ? "Traffic of a step\n"
                      : "Traffic of the last step; none in steady state, with its update and that "
                        "of the step before it applied, came before\n") +
                 TrafficTable(usage.traffic, trainer.engine().config(), own));
  }
  progress.Say(absl::StrFormat("%.0f tokens/s", history.TokensPerSecond()));
  return absl::OkStatus();
}

}  // namespace ebb::gpt

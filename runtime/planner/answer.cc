#include "ebb/runtime/planner/answer.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/engine/engine_inputs.h"
#include "ebb/runtime/engine/matrix_groups.h"
#include "ebb/runtime/planner/batch.h"
#include "ebb/runtime/trace/timeline.h"
#include "ebb/sharding/memory_model.h"
#include "ebb/sharding/plan.h"
#include "ebb/sharding/split.h"
#include "ebb/sharding/state_pieces.h"

namespace ebb::planner {
namespace {

using sharding::OpList;
using sharding::PlannedScope;
using sharding::Resource;

bool IsBlock(const ModelVisit* visit) {
  return visit != nullptr && visit->is_block;
}

// The workspace has the kept tensors of every block that is between its forward and its backward.
Peak PeakOf(const sharding::Plan& plan, const OpList& list,
            std::span<const ModelVisit* const> visits, const Pass& pass,
            const Activations& activations) {
  const auto blocks = std::count_if(visits.begin(), visits.end(), IsBlock);
  const int64_t least = activations.scratch + activations.batch,
                of_block =
                    blocks == 0 || pass.recompute ? activations.kept : activations.kept / blocks;
  const std::vector<sharding::ClassBytes> alive = sharding::AliveBytes(list, Tier::kDevice);
  Peak peak{.moment = "the begin of a step"};
  int64_t workspace = least, kept = 0;
  std::string moment = peak.moment;
  for (size_t i = 0; i < alive.size(); ++i) {
    const sharding::Op& op = list.ops[i];
    if (op.code() == sharding::Code::kKernels && op.scope >= 0 && !op.goes_on) {
      const PlannedScope& scope = plan.scopes[op.scope];
      const bool is_block = IsBlock(visits[scope.visit]);
      if (is_block && (pass.recompute || !scope.backward)) kept += of_block;
      workspace = least + std::min(kept, activations.kept);
      if (is_block && (pass.recompute || scope.backward)) kept -= of_block;
      moment = absl::StrCat(scope.backward ? "backward" : "forward", " of ",
                            plan.unit_names[scope.unit]);
    }
    int64_t bytes = workspace;
    for (const int64_t of_class : alive[i]) bytes += of_class;
    if (bytes <= peak.bytes) continue;
    peak = {.moment = moment, .bytes = bytes, .classes = alive[i]};
    peak.classes[static_cast<int>(StateClass::kWorkspace)] = workspace;
  }
  return peak;
}

// The arguments with which an engine would be created.
struct Resolved {
  const Model* model = nullptr;  // of one of the config's tensor ranks
  Config config;
  Pass pass;
  ModelSpec spec;  // divided
  sharding::PlanInputs Inputs(int ranks) const {
    sharding::PlanInputs inputs = PlanInputsFor(spec, config, ranks, /*own=*/nullptr);
    inputs.cap_error = sharding::PlanInputs::CapError::kNeed;
    return inputs;
  }
};

absl::StatusOr<Resolved> Resolve(const Question& question, const Answer& answer) {
  EBB_RETURN_IF_ERROR(answer.config.Validate());
  const auto tensor = static_cast<int>(answer.config.ebb.mesh.tensor);
  const Model* const model = question.model_over(tensor);
  if (model == nullptr)
    return absl::InvalidArgumentError(
        absl::StrCat("\"ebb.mesh.tensor\" is ", tensor,
                     ": of this model it is not known how tensor ranks share "
                     "its parameters; give --model, --config-json or sizes"));
  Resolved resolved{.model = model, .config = {}, .pass = question.pass, .spec = {}};
  EBB_ASSIGN_OR_RETURN(resolved.config, answer.config.ForWorld(question.ranks));
  Pass& pass = resolved.pass;
  pass.recompute = answer.choice.recompute;
  pass.sequences = resolved.config.micro_batch_size;
  pass.micro_batches = resolved.config.gradient_accumulation_steps;
  pass.micro_batches_per_round = resolved.config.ebb.micro_batches_per_round;
  pass.compute = resolved.config.compute;
  EBB_ASSIGN_OR_RETURN(ModelSpec spec, SpecOf(*model, pass));
  // The first tensor rank has the largest blocks.
  EBB_ASSIGN_OR_RETURN(spec, ebb::WithBlocks(std::move(spec), /*rank=*/0, tensor));
  EBB_ASSIGN_OR_RETURN(spec, WithMatrixGroups(std::move(spec), resolved.config));
  if (tensor > 1) EBB_RETURN_IF_ERROR(CheckMatricesOverTensor(spec));
  resolved.spec = Divided(std::move(spec), resolved.config, /*own=*/nullptr);
  return resolved;
}

// The step that the engine would run on the machine.
struct PlannedStep {
  sharding::Plan plan;
  OpList first, carrying;  // without updates of the step before, and with them, if it leaves any
  const OpList& later() const { return plan.carries_updates ? carrying : first; }
  sharding::Simulated simulated;
  sharding::StepBound bound;
  sharding::Amounts rates;
  double tensor_seconds = 0, tensor_bytes = 0;
};

double TokensOfStep(const Question& question, const Resolved& resolved) {
  const Pass& pass = resolved.pass;
  return question.data_ranks(resolved.model->tensor_ranks) *
         static_cast<double>(pass.micro_batches) * static_cast<double>(pass.tokens());
}

// Adds what the layers exchange in a step.
void AddExchanges(const sharding::MachineCosts& costs, PlannedStep& step) {
  const sharding::Plan& plan = step.plan;
  step.tensor_bytes = static_cast<double>(plan.BytesOf(sharding::Role::kScopes));
  if (step.tensor_bytes == 0) return;
  const auto seconds = [&costs](std::span<const sharding::Op> ops) {
    double sum = 0;
    for (const sharding::Op& op : ops)
      if (op.role == sharding::Role::kScopes) sum += costs.ExchangeSeconds(op);
    return sum;
  };
  step.tensor_seconds =
      seconds(plan.ops) + (plan.step_rounds - plan.decisions.rounds) * seconds(plan.MiddleRound());
}

// Nothing: it cannot have more than `enough` tokens a second.
absl::StatusOr<std::optional<PlannedStep>> StepOf(const Question& question,
                                                  const Resolved& resolved, double enough) {
  // A few steps that are simulated may overlap those before and after them by this much.
  constexpr double kOverlap = 1.02;
  PlannedStep step;
  EBB_ASSIGN_OR_RETURN(step.plan, sharding::PlanStep(resolved.Inputs(question.ranks)));
  const Machine& machine = question.machine;
  const std::vector<sharding::KernelWork> work =
      WorkOf(*resolved.model, VisitsOf(*resolved.model, resolved.spec), resolved.pass,
             {.flops = machine.flops_of_rank(question.ranks),
              .bytes = machine.gpu_memory_gb_s * 1e9,
              .launch = machine.launch_us * 1e-6});
  EBB_ASSIGN_OR_RETURN(
      const sharding::MachineCosts costs,
      sharding::MachineCosts::Make(step.plan, machine.ForSimulation(question.ranks), work,
                                   /*caller_awaits_report=*/false));
  AddExchanges(costs, step);
  step.first = sharding::ListOf(step.plan, /*carrying=*/false);
  const bool carries = step.plan.carries_updates;
  if (carries) step.carrying = sharding::ListOf(step.plan, /*carrying=*/true);
  if (enough > 0 && TokensOfStep(question, resolved) * kOverlap <=
                        enough * sharding::LeastSeconds(step.later(), costs))
    return std::nullopt;
  const OpList* const both[] = {&step.first, &step.later()};
  const sharding::Cells cells({both, carries ? size_t{2} : 1}, step.plan);
  sharding::DeriveWaits(cells, step.first);
  if (carries) sharding::DeriveWaits(cells, step.carrying);
  EBB_ASSIGN_OR_RETURN(step.simulated, sharding::Simulate(cells, step.first, step.later(), costs));
  step.bound = sharding::BoundOf(step.plan, step.later(), costs);
  step.rates = costs.rates();
  return step;
}

absl::Status AddTime(const Question& question, const Resolved& resolved, Depth depth, double enough,
                     Answer& answer) {
  EBB_ASSIGN_OR_RETURN(std::optional<PlannedStep> planned, StepOf(question, resolved, enough));
  if (!planned) return absl::OkStatus();
  PlannedStep& step = *planned;
  const Pass& pass = resolved.pass;
  answer.memory = sharding::PredictMemory(step.plan.table.bytes);
  StepTime time;
  time.tensor_seconds = step.tensor_seconds;
  time.tensor_bytes = step.tensor_bytes;
  for (int r = 0; r < sharding::kResources; ++r) {
    const auto resource = static_cast<Resource>(r);
    time.moved[resource] = step.simulated.busy.resources[r] * step.rates[resource];
  }
  const double seconds = step.simulated.seconds_per_step,
               micro_batches = static_cast<double>(pass.micro_batches);
  if (seconds > 0) {
    time.tokens_per_second = TokensOfStep(question, resolved) / seconds;
    time.flops_per_second =
        micro_batches * FlopsOf(question.model, pass) / resolved.model->tensor_ranks / seconds;
  }
  if (depth == Depth::kTimeAndPeak)
    answer.peak = PeakOf(step.plan, step.later(), VisitsOf(*resolved.model, resolved.spec), pass,
                         answer.activations);
  time.simulated = std::move(step.simulated);
  time.bound = step.bound;
  time.simulated.spans.clear();
  answer.time = std::move(time);
  return absl::OkStatus();
}

void SumUp(const Machine& machine, int ranks, Answer& answer) {
  answer.held = {};
  for (const MemoryRow& row : answer.memory)
    answer.held[static_cast<int>(row.tier)] += static_cast<int64_t>(row.predicted_bytes);
  auto& [device, ram, disk] = answer.held;
  // Staging: state passes through it when a call asks for state.
  if (!machine.is_cpu || disk > 0) ram += 2 * sharding::kStateStagingBytes;
  answer.room = {machine.device_room(ranks), machine.ram_room(ranks), machine.disk_room(ranks)};
  if (machine.is_cpu) answer.room[1] = std::max<int64_t>(0, answer.room[0] - device);
}

absl::Status Fill(const Question& question, Depth depth, double enough, Answer& answer) {
  EBB_ASSIGN_OR_RETURN(const Resolved resolved, Resolve(question, answer));
  EBB_ASSIGN_OR_RETURN(answer.activations, ActivationsOf(*resolved.model, resolved.pass));
  EBB_ASSIGN_OR_RETURN(const sharding::Table table,
                       sharding::PlanTable(resolved.Inputs(question.ranks)));
  answer.memory = sharding::PredictMemory(table.bytes);
  SumUp(question.machine, question.ranks, answer);
  if (depth == Depth::kMemory || !answer.fits()) return absl::OkStatus();
  EBB_RETURN_IF_ERROR(AddTime(question, resolved, depth, enough, answer));
  SumUp(question.machine, question.ranks, answer);
  return absl::OkStatus();
}

std::string NameOf(const sharding::Plan& plan, const sharding::Op& op) {
  if (op.code() != sharding::Code::kKernels) return std::string(Name(op.role));
  if (op.scope < 0) return "kernels";
  return plan.scopes[op.scope].backward ? "backward" : "forward";
}

std::string_view UnitOf(const sharding::Plan& plan, const sharding::Op& op) {
  int unit = -1;
  if (!op.parts.empty()) unit = op.parts.front().unit;
  if (op.scope >= 0) unit = plan.scopes[op.scope].unit;
  return unit < 0 ? std::string_view() : plan.unit_names[unit];
}

// Adds a track for each line, and more of them while several spans of a line are in flight, because
// Perfetto drops spans of one track that partly overlap. Each span's track is its line before.
void PutOnTracks(std::vector<Timeline::Span>& spans, Timeline& timeline) {
  std::stable_sort(spans.begin(), spans.end(), [](const auto& a, const auto& b) {
    return std::pair(a.track, a.begin_ns) < std::pair(b.track, b.begin_ns);
  });
  std::vector<std::pair<int, int64_t>>
      tracks;  // of the line: each track, and until when it is used
  int line = -1;
  for (Timeline::Span& span : spans) {
    if (span.track != line) tracks.clear();
    line = span.track;
    auto free = std::find_if(tracks.begin(), tracks.end(),
                             [&](const auto& track) { return track.second <= span.begin_ns; });
    if (free == tracks.end()) {
      const std::string number = tracks.empty() ? "" : absl::StrCat(" ", tracks.size() + 1);
      const int track =
          timeline.AddTrack(absl::StrCat(std::string(sharding::NameOfLine(line)), number));
      free = tracks.insert(free, {track, 0});
    }
    span.track = free->first;
    free->second = span.end_ns;
  }
}

}  // namespace

Choice ChoiceOf(const Config& config, bool recompute) {
  return {.stage = config.zero.stage,
          .parameters = config.zero.offload_param.device,
          .states = config.zero.offload_optimizer.device,
          .boundaries = config.activation_tier(),
          .recompute = recompute,
          .tensor = static_cast<int>(config.ebb.mesh.tensor)};
}

Config WithGathers(const Model& model, Config config) {
  const Config defaults;
  config.zero.prefetch_bucket_size =
      std::max(defaults.zero.prefetch_bucket_size, 2 * model.largest_unit());
  config.zero.max_live_parameters =
      std::max(defaults.zero.max_live_parameters, 4 * model.largest_unit());
  return config;
}

const Model* Question::model_over(int tensor) const {
  if (tensor == 1) return &model;
  const auto found = over_tensor.find(tensor);
  return found == over_tensor.end() ? nullptr : &found->second;
}

std::vector<int> Question::possible_widths() const {
  const int here = machine.ranks_per_host(ranks);
  std::vector<int> possible;
  for (const int width : widths) {
    const bool is_one_of_several = widths.size() > 1;
    if (ranks % width != 0 || (is_one_of_several && here % width != 0) ||
        (is_one_of_several && sequences > 0 && data_ranks(width) > sequences))
      continue;
    possible.push_back(width);
  }
  return possible;
}

Config Question::With(const Choice& choice) const {
  Config changed = config;
  const Model* const of_rank = model_over(choice.tensor);
  if (choice.tensor != changed.ebb.mesh.tensor && sizes_gathers && of_rank != nullptr)
    changed = WithGathers(*of_rank, std::move(changed));
  changed.ebb.mesh.tensor = choice.tensor;
  changed.zero.stage = choice.stage;
  changed.zero.offload_param.device = choice.parameters;
  changed.zero.offload_optimizer.device = choice.states;
  if (choice.boundaries != changed.activation_tier())
    changed.ebb.offload_activations = choice.boundaries;
  std::vector<std::string>& parameters = changed.zero.offload_param.nvme_paths;
  std::vector<std::string>& others = changed.zero.offload_optimizer.nvme_paths;
  if (choice.parameters == Tier::kNvme && parameters.empty())
    parameters = others.empty() ? std::vector<std::string>{kNvmeFolder} : others;
  // Boundary activations are in the swap file of the states.
  if ((choice.states == Tier::kNvme || choice.boundaries == Tier::kNvme) && others.empty())
    others = parameters.empty() ? std::vector<std::string>{kNvmeFolder} : parameters;
  return changed;
}

int64_t Question::sequences_of_rank(int tensor) const {
  const int64_t parts = data_ranks(tensor);
  return sequences % parts == 0
             ? sequences / parts
             : SequencesThatCutWell(static_cast<double>(sequences) / static_cast<double>(parts));
}

int64_t Question::sequences_of_step() const {
  return sequences_of_rank(first_width()) * data_ranks(first_width());
}

int Question::first_width() const {
  const std::vector<int> possible = possible_widths();
  return possible.empty() ? widths.front() : possible.front();
}

int Question::hosts() const {
  const int here = machine.ranks_per_host(ranks);
  return (ranks + here - 1) / here;
}

std::string WordsOfBatch(const Config& config) {
  const int64_t count = std::max<int64_t>(1, config.gradient_accumulation_steps),
                sequences = std::max<int64_t>(1, config.micro_batch_size),
                of_round = config.ebb.micro_batches_per_round;
  std::string text = absl::StrCat(count, count == 1 ? " micro-batch of " : " micro-batches of ",
                                  sequences, sequences == 1 ? " sequence" : " sequences");
  if (count > 1 && of_round != 1)
    absl::StrAppend(&text, ", ",
                    of_round == 0 || of_round == count ? "all" : absl::StrCat(of_round),
                    " in a round");
  return text;
}

bool Answer::fits() const {
  if (!refused.ok()) return false;
  for (size_t tier = 0; tier < held.size(); ++tier) {
    if (held[tier] > room[tier]) return false;
  }
  return true;
}

int64_t Answer::locked_bytes() const {
  int64_t bytes = 0;
  for (const MemoryRow& row : memory)
    bytes += row.tier == Tier::kCpu ? static_cast<int64_t>(row.predicted_bytes) : 0;
  return bytes;
}

std::string Answer::lacks() const {
  if (!refused.ok()) return std::string(refused.message());
  constexpr const char* kOn[] = {"on the device", "in RAM", "on NVMe"};
  std::string text;
  for (size_t tier = 0; tier < held.size(); ++tier) {
    if (held[tier] <= room[tier]) continue;
    constexpr double kGiB = 1 << 30;
    absl::StrAppendFormat(&text, "%s%.1f of %.1f GiB %s", text.empty() ? "needs " : ", ",
                          static_cast<double>(held[tier]) / kGiB,
                          static_cast<double>(room[tier]) / kGiB, kOn[tier]);
  }
  return text;
}

bool UpdatesEarly(const Config& config) {
  return config.ebb.asynchronous_step == AsynchronousStep::kAuto && config.gradient_clipping == 0 &&
         !config.checks_overflow();
}

Answer AnswerFor(const Question& question, const Config& config, bool recompute, Depth depth,
                 double enough) {
  Answer answer{.choice = ChoiceOf(config, recompute), .config = config};
  answer.refused = Fill(question, depth, enough, answer);
  return answer;
}

Answer AnswerFor(const Question& question, const Choice& choice, Depth depth) {
  return AnswerFor(question, question.With(choice), choice.recompute, depth);
}

Remedy RemedyFor(const Question& question, const Answer& lacking, Depth depth) {
  const absl::StatusOr<Resolved> resolved = Resolve(question, lacking);
  if (!resolved.ok()) return {};
  const auto& [device, ram, disk] = lacking.room;
  sharding::MemoryCaps caps{.device = device,
                            .host = ram,
                            .disk = disk,
                            .of_config = false,
                            .relief = "use a machine with more memory"};
  if (question.machine.is_cpu)
    caps = {.together = device, .disk = disk, .of_config = false, .relief = caps.relief};
  Remedy remedy{.advice = sharding::FindAdvice(resolved->Inputs(question.ranks), caps)};
  if (!remedy.advice.config) return remedy;
  Answer answer = AnswerFor(question, *remedy.advice.config, lacking.choice.recompute, depth);
  answer.keys = remedy.advice.keys;
  if (answer.fits()) remedy.answer = std::move(answer);
  return remedy;
}

double DiskBytesWrittenADay(const Answer& answer, const Machine& machine, int ranks) {
  constexpr double kDay = 86400;
  if (!answer.time || answer.time->simulated.seconds_per_step <= 0) return 0;
  return answer.time->moved[Resource::kDiskWrite] * machine.ranks_per_host(ranks) * kDay /
         answer.time->simulated.seconds_per_step;
}

double DaysOfDisks(const Answer& answer, const Machine& machine, int ranks) {
  const double of_day = DiskBytesWrittenADay(answer, machine, ranks);
  return of_day > 0
             ? machine.disk_tbw * machine.rank_share(ranks) * machine.ranks_per_host(ranks) / of_day
             : 0;
}

absl::Status WriteTrace(const Question& question, const Answer& answer, const std::string& path) {
  EBB_ASSIGN_OR_RETURN(const Resolved resolved, Resolve(question, answer));
  EBB_ASSIGN_OR_RETURN(const std::optional<PlannedStep> planned,
                       StepOf(question, resolved, /*enough=*/0));
  const PlannedStep& step = *planned;
  std::vector<Timeline::Span> spans;
  std::set<std::string> names;  // spans refer to them
  for (const sharding::SimulatedSpan& span : step.simulated.spans) {
    const OpList& list = span.step == 0 ? step.first : step.later();
    const sharding::Op& op = list.ops[span.op];
    spans.push_back({.operation = names.insert(NameOf(step.plan, op)).first->c_str(),
                     .subject = UnitOf(step.plan, op),
                     .track = op.ends,
                     .begin_ns = std::llround(span.begin * 1e9),
                     .end_ns = std::llround(span.end * 1e9),
                     .step = span.step + 1,
                     .bytes = op.bytes});
  }
  Timeline timeline({.name = "ebb-plan", .spans_max = std::ssize(spans) + 1});
  PutOnTracks(spans, timeline);
  for (const Timeline::Span& span : spans) timeline.Add(span);
  EBB_RETURN_IF_ERROR(Timeline::Create(path));
  return timeline.AppendTo(path);
}

}  // namespace ebb::planner

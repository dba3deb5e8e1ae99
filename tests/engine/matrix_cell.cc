#include "tests/engine/matrix_cell.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/optim/update.h"
#include "ebb/runtime/base/status_macros.h"
#include "tests/sharding/random_model.h"

namespace ebb::testing {
namespace {

constexpr int kWidths[] = {13, 67};
constexpr Tier kTierLevels[] = {Tier::kDevice, Tier::kCpu, Tier::kNvme};

struct Rounds {
  int micro_batches = 1, per_round = 1;
};
constexpr Rounds kRoundLevels[] = {{1, 1}, {4, 1}, {4, 2}, {4, 4}};

enum Update : int { kAuto, kLate, kOff, kHeld };

// Optimizers with two states, with one, with one that does not begin with zero, with three; with
// norms of whole parameters; and of whole matrices. The large model's biases have other rules beside
// three of them, and all biases beside the last.
constexpr OptimizerType kRules[] = {
    OptimizerType::kAdamW, OptimizerType::kLion, OptimizerType::kAdagrad, OptimizerType::kRmsprop,
    OptimizerType::kLamb,  OptimizerType::kLars, OptimizerType::kMuon};

constexpr OptimizerStates kStateLevels[] = {OptimizerStates::kFloat32, OptimizerStates::kBFloat16,
                                            OptimizerStates::k8Bit};

struct StateRead {
  StateClass what;
  std::string name = "";
};
std::vector<StateRead> StatesOf(const Config& config) {
  std::vector<StateRead> states = {{StateClass::kMaster}, {StateClass::kParameter}};
  const auto add = [&](const OptimizerConfig& optimizer) {
    for (std::string_view name : optim::StateNames(optimizer)) {
      const auto same = [&](const StateRead& state) { return state.name == name; };
      if (std::none_of(states.begin(), states.end(), same))
        states.push_back({StateClass::kOptimizer, std::string(name)});
    }
  };
  add(config.optimizer);
  if (config.optimizer.type == OptimizerType::kMuon) add(OptimizerConfig());  // of biases
  for (const auto& [name, group] : config.ebb.parameter_groups)
    if (group.optimizer) add(*group.optimizer);
  return states;
}

// The state of a run on a rank, so that another engine can go on with it.
class SavedRun {
 public:
  // `starts`: of each parameter in a vector of all, and their end.
  static absl::StatusOr<SavedRun> Of(Engine& engine, std::span<const StateRead> states,
                                     std::span<const size_t> starts) {
    SavedRun saved;
    saved.starts_ = starts;
    for (const StateRead& state : states) {
      if (state.what == StateClass::kParameter) continue;  // masters cover them
      std::vector<float>& whole =
          saved.states_.emplace_back(state, std::vector<float>(starts.back())).second;
      const auto keep = [&](const Slice& slice, std::span<const float> values) {
        std::copy(values.begin(), values.end(), saved.At(slice, whole));
        return absl::OkStatus();
      };
      EBB_RETURN_IF_ERROR(engine.Read(state.what, keep, state.name));
    }
    EBB_ASSIGN_OR_RETURN(saved.run_, engine.training_state());
    return saved;
  }

  // Into an engine of the same world, model and config.
  absl::Status Resume(Engine& engine) {
    for (auto& [state, whole] : states_) {
      const auto give = [&](const Slice& slice, std::span<float> values) {
        std::copy_n(At(slice, whole), values.size(), values.begin());
        return absl::OkStatus();
      };
      EBB_RETURN_IF_ERROR(engine.Write(state.what, give, state.name));
    }
    return engine.SetTrainingState(run_);
  }

 private:
  float* At(const Slice& slice, std::vector<float>& whole) const {
    return whole.data() + starts_[static_cast<size_t>(slice.parameter)] + slice.begin;
  }

  std::span<const size_t> starts_;
  std::vector<std::pair<StateRead, std::vector<float>>> states_;
  TrainingState run_;
};

}  // namespace

std::span<const AxisLevels> Axes() {
  static const std::vector<AxisLevels> kLevels = {
      {"world", {"1", "2", "3", "4"}},
      {"stage", {"0", "1", "2", "3"}},
      {"compute", {"fp32", "bf16", "fp16"}},
      {"micro-batches", {"1 by 1", "4 by 1", "4 by 2", "4 by 4"}},
      {"reduce_at", {"default", "round", "step"}},
      {"prefetch", {"0", "1", "all"}},
      {"coalesce", {"0", "3 KB", "1 GB", "default"}},
      {"update", {"auto", "late", "off", "held"}},
      {"checks", {"off", "on"}},
      {"persistence", {"none", "mixed", "all"}},
      {"reshard", {"yes", "no"}},
      {"boundaries", {"trainer", "engine"}},
      {"communication", {"compute", "fp32", "other"}},
      {"accumulation", {"fp32", "bf16"}},
      {"reduction_group", {"world", "1", "half"}},
      {"shard_group", {"world", "1", "half"}},
      {"model", {"tied", "frozen first", "several dtypes"}},
      {"between", {"nothing", "evaluation", "suspension", "another engine"}},
      {"size", {"small", "large"}},
      {"parameters", {"device", "cpu", "nvme"}},
      {"optimizer", {"device", "cpu", "nvme"}},
      {"gradients", {"follow", "device", "cpu", "nvme"}},
      {"activations", {"device", "cpu", "nvme"}},
      {"faster share", {"none", "some"}},
      {"sub-groups", {"default", "2048"}},
      {"masters", {"plain", "split", "none"}},
      {"disk", {"default", "threads"}},
      {"rule",
       {"AdamW", "Lion, and AdamW of biases", "Adagrad", "centered RMSprop with momentum",
        "LAMB, and Adam of biases", "LARS with momentum, and SGD of biases",
        "Muon, and AdamW of biases"}},
      {"reports", {"each step", "last"}},
      {"secondary", {"1", "2", "4"}},
      {"states", {"fp32", "bf16", "8bit"}},
  };
  return kLevels;
}

std::vector<int> LevelCounts() {
  std::vector<int> counts;
  for (const AxisLevels& axis : Axes()) counts.push_back(static_cast<int>(axis.levels.size()));
  return counts;
}

std::string Cell::Describe() const {
  std::string text;
  for (size_t axis = 0; axis < Axes().size(); ++axis) {
    const AxisLevels& of = Axes()[axis];
    absl::StrAppend(&text, axis == 0 ? "" : ", ", std::string(of.name), " ",
                    std::string(of.levels[static_cast<size_t>(levels[axis])]));
  }
  return text;
}

ToyOptions Cell::MakeModel() const {
  return {.width = kWidths[(*this)[kSize]],
          .frozen_first = (*this)[kModel] == 1,
          .own_dtypes = (*this)[kModel] == 2,
          .groups = (*this)[kSize] == 1,
          .boundaries = (*this)[kBoundaries] == 1};
}

bool Cell::updates_matrices() const {
  return kRules[static_cast<size_t>((*this)[kRule])] == OptimizerType::kMuon;
}
Tier Cell::parameter_tier() const {
  return (*this)[kStage] == 3 ? kTierLevels[(*this)[kParameters]] : Tier::kDevice;
}
Tier Cell::optimizer_tier() const {
  return (*this)[kStage] > 0 ? kTierLevels[(*this)[kOptimizer]] : Tier::kDevice;
}

Config Cell::MakeConfig(const std::string& nvme_path) const {
  const auto pick = [this](Axis axis, const auto& choices) {
    return choices[static_cast<size_t>((*this)[axis])];
  };
  const Rounds rounds = pick(kRounds, kRoundLevels);
  const bool checks = (*this)[kChecks] == 1;
  Config config;
  config.micro_batch_size = 1;
  config.gradient_accumulation_steps = rounds.micro_batches;
  config.ebb.micro_batches_per_round =
      rounds.per_round == rounds.micro_batches ? 0 : rounds.per_round;
  config.compute = pick(kDType, std::array{DType::kFloat32, DType::kBFloat16, DType::kFloat16});
  if ((*this)[kCommunication] == 1) config.communication = DType::kFloat32;
  if ((*this)[kCommunication] == 2)
    config.communication = config.compute == DType::kFloat16 ? DType::kBFloat16 : DType::kFloat16;
  config.accumulation = pick(kAccumulation, std::array{DType::kFloat32, DType::kBFloat16});
  config.zero.stage = (*this)[kStage];
  config.ebb.reduce_at =
      pick(kReduceAt, std::array{ReduceAt::kDefault, ReduceAt::kRound, ReduceAt::kStep});
  config.ebb.prefetch_depth =
      pick(kPrefetch, std::array<int64_t, 3>{0, 1, std::numeric_limits<int64_t>::max()});
  // A unit is 1 KB in 16-bit dtypes and 2 in fp32, on up to 3 ranks: of 3 KB, one to three.
  if ((*this)[kCoalesce] < 3)
    config.ebb.coalesce_bytes = pick(kCoalesce, std::array<int64_t, 3>{0, 3072, int64_t{1} << 30});
  config.ebb.asynchronous_step =
      pick(kUpdate, std::array{AsynchronousStep::kAuto, AsynchronousStep::kLate,
                               AsynchronousStep::kOff, AsynchronousStep::kAuto});
  config.ebb.check_overflow = checks;
  config.gradient_clipping = checks ? 0.1 : 0;
  // The first layer is over the threshold; of the three others the mixed limit keeps two.
  const int64_t width = MakeModel().width, small_unit = width * width + width;
  config.zero.param_persistence_threshold =
      pick(kPersistence, std::array<int64_t, 3>{0, small_unit, 1'000'000});
  if ((*this)[kPersistence] == 1) config.zero.model_persistence_threshold = 2 * small_unit;
  config.ebb.reshard_after_forward = (*this)[kReshard] == 0;
  config.ebb.shard_group = shard_group();
  // ForWorld refuses 2 of 3 ranks.
  if (world() != 3) config.zero.hpz_partition_size = int64_t{1} << (*this)[kSecondary];
  if (shard_group() == 0 && (*this)[kReductionGroup] == 1) config.ebb.reduction_group = 1;
  if (shard_group() == 0 && (*this)[kReductionGroup] == 2 && world() % 2 == 0)
    config.ebb.reduction_group = world() / 2;
  // The scale falls at the overflow and rises again after two clean steps.
  config.loss_scale.initial_scale_power = 8;
  config.loss_scale.hysteresis = 1;
  config.loss_scale.window = 1;
  config.optimizer.type = pick(kRule, std::to_array(kRules));
  config.optimizer.learning_rate = 1e-2;
  config.optimizer.weight_decay = 0.1;
  config.optimizer.initial_accumulator_value = 0.5;
  if (config.optimizer.type == OptimizerType::kRmsprop) {
    config.optimizer.momentum = 0.5;
    config.optimizer.epsilon = 1e-3;
    config.optimizer.centered = true;
  }
  if (config.optimizer.type == OptimizerType::kLars) {
    config.optimizer.momentum = 0.5;
    config.optimizer.trust_coefficient = 0.1;
  }
  if (config.optimizer.type == OptimizerType::kMuon) {
    config.optimizer.momentum = 0.75;
    config.optimizer.nesterov = true;
    config.optimizer.adam_learning_rate = 1e-3;
    if (config.compute == DType::kFloat32) config.optimizer.newton_schulz_dtype = DType::kFloat32;
  }
  if (MakeModel().groups) {
    ParameterGroupConfig& bias = config.ebb.parameter_groups["bias"];
    OptimizerConfig own = {.learning_rate = 1e-2};
    switch (config.optimizer.type) {
      case OptimizerType::kLamb:
        own.type = OptimizerType::kAdam;
        own.decoupled_weight_decay = false;
        own.weight_decay = 0.1;
        break;
      case OptimizerType::kLars:
        own.type = OptimizerType::kSgd;
        own.momentum = 0.5;
        break;
      default:
        break;
    }
    if (config.optimizer.type == OptimizerType::kLion || own.type != OptimizerType::kAdamW) {
      bias.optimizer = own;
    } else {
      bias.weight_decay = 0.0;
    }
  }

  OffloadParamConfig& parameters = config.zero.offload_param;
  OffloadOptimizerConfig& optimizer = config.zero.offload_optimizer;
  parameters.device = parameter_tier();
  optimizer.device = optimizer_tier();
  parameters.nvme_paths = optimizer.nvme_paths = {nvme_path};
  parameters.pin_memory = optimizer.pin_memory = false;
  if (optimizer_tier() != Tier::kDevice || parameter_tier() != Tier::kDevice) {
    if ((*this)[kGradients] == 1) config.ebb.offload_gradients = Tier::kDevice;
    if ((*this)[kGradients] == 2) config.ebb.offload_gradients = Tier::kCpu;
    if ((*this)[kGradients] == 3) config.ebb.offload_gradients = Tier::kNvme;
  }
  if ((*this)[kActivations] != 0)
    config.ebb.offload_activations = kTierLevels[(*this)[kActivations]];
  const bool share = (*this)[kFasterShare] == 1;
  // One and a half of the toy's large units.
  parameters.max_in_cpu = share ? 7'000 : 0;
  if (share) optimizer.ratio = 0.6;
  if (share && optimizer_tier() == Tier::kNvme) config.ebb.host_memory = int64_t{1} << 20;
  if ((*this)[kSubGroups] == 1) config.zero.sub_group_size = 2048;
  if ((*this)[kDisk] == 1) config.ebb.io_backend = IoBackend::kThreads;
  if (!TakesNorms(config.optimizer.type) && !updates_matrices()) {
    config.optimizer.states = pick(kStates, std::to_array(kStateLevels));
    config.optimizer.min_8bit_size = 100;  // of the toy's biases some, and no weights
  }
  config.ebb.split_master = (*this)[kMasters] == 1 && config.compute == DType::kBFloat16;
  config.ebb.stochastic_rounding = (*this)[kMasters] == 2 && config.compute == DType::kBFloat16;
  return config;
}

int Cell::reductions() const {
  const Rounds rounds = kRoundLevels[(*this)[kRounds]];
  return MakeConfig().reduces_at_round() ? rounds.micro_batches / rounds.per_round : 1;
}

int Cell::shard_group() const {
  if ((*this)[kStage] == 0 || world() == 1) return 0;
  if ((*this)[kShardGroup] == 1) return 1;
  return (*this)[kShardGroup] == 2 && world() % 2 == 0 ? world() / 2 : 0;
}

bool Cell::has_secondary() const {
  return (*this)[kStage] == 3 && world() == 4 && shard_group() == 0 && (*this)[kSecondary] == 1 &&
         (*this)[kPersistence] != 2;
}

Cell Cell::Reference() const {
  Cell plain;
  for (const Axis axis :
       {kWorld, kDType, kChecks, kCommunication, kAccumulation, kModel, kSize, kRule, kStates})
    plain[axis] = (*this)[axis];
  // With every group of one rank, and with one group of all, the sum is in rank order.
  if (shard_group() == 0 && world() == 4 && (*this)[kReductionGroup] == 2)
    plain[kReductionGroup] = 2;
  // The norm's sum depends on where the slices begin.
  if (shard_group() > 0) {
    plain[kStage] = 1;
    plain[kShardGroup] = shard_group() == 1 ? 1 : 2;
  }
  if (MakeConfig().communication_dtype() == MakeConfig().compute) plain[kCommunication] = 0;
  plain[kRounds] = (*this)[kRounds];
  if (reductions() > 1) {
    plain[kReduceAt] = 1;
  } else if (kRoundLevels[(*this)[kRounds]].micro_batches > 1) {
    plain[kRounds] = 3;
  }
  plain[kUpdate] = kOff;
  // Without masters there are other numbers.
  if (MakeConfig().ebb.stochastic_rounding) plain[kMasters] = 2;
  return plain;
}

bool Cell::IsRedundant() const {
  const Rounds rounds = kRoundLevels[(*this)[kRounds]];
  const bool several_rounds = rounds.micro_batches > rounds.per_round;
  const bool slices = (*this)[kStage] == 3 && world() > 1;
  const bool gathers = slices && (*this)[kPersistence] != 2;
  const bool never_early = (*this)[kChecks] == 1 || (*this)[kDType] == 2;
  if ((*this)[kReduceAt] == 0) return true;  // is one of the others
  if ((*this)[kReports] != 0) return true;   // on the CPU Finish has them anyway
  if (!several_rounds && (*this)[kReduceAt] != 1) return true;
  if (!slices && (*this)[kPersistence] != 0) return true;
  if (!gathers && ((*this)[kPrefetch] != 0 || (*this)[kReshard] != 0)) return true;
  if (never_early && (*this)[kUpdate] == kAuto) return true;  // is late
  if ((*this)[kDType] == 0 && (*this)[kCommunication] == 1) return true;
  if (shard_group() == 0 && (*this)[kShardGroup] != 0) return true;
  if ((*this)[kSecondary] != 0 && !has_secondary()) return true;
  if (shard_group() > 0 && (*this)[kReductionGroup] != 0) return true;
  if (world() < 4 && (*this)[kReductionGroup] != 0) return true;
  if ((*this)[kParameters] != 0 && parameter_tier() == Tier::kDevice) return true;
  if ((*this)[kOptimizer] != 0 && optimizer_tier() == Tier::kDevice) return true;
  if ((*this)[kMasters] != 0 && (*this)[kDType] != 1) return true;
  if ((*this)[kStates] != 0 &&
      (TakesNorms(kRules[static_cast<size_t>((*this)[kRule])]) || updates_matrices()))
    return true;
  if ((*this)[kDisk] != 0 && parameter_tier() != Tier::kNvme && optimizer_tier() != Tier::kNvme)
    return true;
  const bool offloads = parameter_tier() != Tier::kDevice || optimizer_tier() != Tier::kDevice;
  return !offloads &&
         ((*this)[kGradients] != 0 || (*this)[kFasterShare] != 0 || (*this)[kSubGroups] != 0);
}

Cell RandomCell(uint64_t seed) {
  sharding::Random random(seed);
  Cell cell;
  for (size_t axis = 0; axis < cell.levels.size(); ++axis)
    cell.levels[axis] = static_cast<int>(random.Between(0, LevelCounts()[axis] - 1));
  return cell;
}

Cell RandomEarlyCell(uint64_t seed) {
  Cell cell = RandomCell(seed);
  cell[kStage] = 3;
  cell[kDType] %= 2;  // fp16 looks for overflows
  cell[kChecks] = 0;
  cell[kUpdate] = cell[kUpdate] == kHeld ? kHeld : kAuto;
  cell[kPersistence] = 0;
  cell[kCoalesce] %= 2;  // several gathers
  cell[kParameters] = cell[kOptimizer] = 2;
  return cell;
}

absl::StatusOr<Outcome> RunCell(const Cell& cell,
                                const std::function<absl::StatusOr<Device>()>& device,
                                bool deterministic_reduce) {
  // Ranks of one process and several of a test program share the path, as several runs do.
  const char* given = std::getenv("TEST_TMPDIR");
  Config config = cell.MakeConfig(given == nullptr ? "/tmp" : given);
  config.ebb.deterministic_reduce = deterministic_reduce;
  const ModelSpec spec = ToyModel(cell.MakeModel()).spec();
  const std::vector<StateRead> states = StatesOf(config);
  std::vector<size_t> starts(1);  // of each parameter in a vector of all
  for (const ParameterSpec& parameter : spec.parameters)
    starts.push_back(starts.back() + static_cast<size_t>(Elements(parameter.shape)));

  // Each rank writes its own report, and its slices of the state into the arrays of the first rank
  // of its shard group.
  std::vector<Outcome> outcomes(static_cast<size_t>(cell.world()));
  Outcome& whole = outcomes[0];
  const size_t group =
      static_cast<size_t>(cell.shard_group() == 0 ? cell.world() : cell.shard_group());
  for (size_t first = 0; first < outcomes.size(); first += group) {
    outcomes[first].state.assign(states.size(), std::vector<uint32_t>(starts.back(), ~uint32_t{0}));
  }
  const auto rank_body = [&](World world) -> absl::Status {
    const int rank = world.rank();
    EBB_ASSIGN_OR_RETURN(const Device own_device, device());
    ToyModel model(cell.MakeModel(), own_device);
    const auto create = [&] { return Engine::Create(world, own_device, model.spec(), config); };
    std::optional<Engine> engine;
    EBB_ASSIGN_OR_RETURN(engine, create());
    Outcome& own = outcomes[static_cast<size_t>(rank)];
    for (int step = 0; step < kMatrixSteps; ++step) {
      const bool overflows = cell[kChecks] == 1 && step == 1 && rank + 1 == cell.world();
      const bool holds = cell[kUpdate] == kHeld && step % 2 == 1;
      EBB_RETURN_IF_ERROR(
          model.Train(*engine, rank, step, StepOptions{.hold_updates = holds}, overflows));
      if (cell[kReports] == 0 || step + 1 == kMatrixSteps) {
        EBB_ASSIGN_OR_RETURN(const StepReport report, engine->Report());
        own.steps.push_back({.number = step,
                             .applied = report.applied,
                             .skipped_steps = report.skipped_steps,
                             .loss = report.loss,
                             .gradient_norm = report.gradient_norm,
                             .loss_scale = report.loss_scale,
                             .learning_rate = report.learning_rate});
        // NaN equals nothing.
        if (!std::isfinite(report.gradient_norm)) own.steps.back().gradient_norm = -1;
      }
      if (cell[kBetween] == 1) EBB_RETURN_IF_ERROR(model.Evaluate(*engine, rank).status());
      if (cell[kBetween] == 2) {
        EBB_RETURN_IF_ERROR(engine->Suspend());
        EBB_RETURN_IF_ERROR(engine->Resume());
      }
      if (cell[kBetween] == 3 && step + 1 < kMatrixSteps) {
        EBB_ASSIGN_OR_RETURN(SavedRun saved, SavedRun::Of(*engine, states, starts));
        engine.reset();
        EBB_ASSIGN_OR_RETURN(engine, create());
        EBB_RETURN_IF_ERROR(saved.Resume(*engine));
      }
    }
    for (size_t s = 0; s < states.size(); ++s) {
      const auto keep = [&](const Slice& slice, std::span<const float> values) {
        uint32_t* const to = outcomes[static_cast<size_t>(rank) / group * group].state[s].data() +
                             starts[static_cast<size_t>(slice.parameter)];
        for (size_t i = 0; i < values.size(); ++i)
          to[static_cast<size_t>(slice.begin) + i] = std::bit_cast<uint32_t>(values[i]);
        return absl::OkStatus();
      };
      EBB_RETURN_IF_ERROR(engine->Read(states[s].what, keep, states[s].name));
    }
    EBB_ASSIGN_OR_RETURN(own.evaluation, model.Evaluate(*engine, rank));
    return absl::OkStatus();
  };
  EBB_RETURN_IF_ERROR(RunThreads(cell.world(), rank_body));
  for (const Outcome& other : outcomes) {
    if (other.steps != whole.steps || other.evaluation != whole.evaluation)
      return absl::InternalError("ranks report different numbers of the same steps");
    if (!other.state.empty() && other.state != whole.state)
      return absl::InternalError("replicas of the same slices differ");
  }
  for (const StateRead& state : states)
    whole.arrays.push_back(absl::StrCat(std::string(Name(state.what)), " ", state.name));
  return whole;
}

std::string FirstDifference(const Outcome& outcome, const Outcome& reference) {
  for (const Outcome::Step& step : outcome.steps) {
    const Outcome::Step& other = reference.steps[static_cast<size_t>(step.number)];
    if (step == other) continue;
    const auto text = [](const Outcome::Step& of) {
      return absl::StrCat("applied ", of.applied, ", skipped ", of.skipped_steps, ", loss ",
                          absl::SixDigits(of.loss), " (", std::bit_cast<uint64_t>(of.loss),
                          "), norm ", absl::SixDigits(of.gradient_norm), " (",
                          std::bit_cast<uint64_t>(of.gradient_norm), "), scale ", of.loss_scale,
                          ", rate ", of.learning_rate);
    };
    return absl::StrCat("step ", step.number, ": ", text(step), "; not ", text(other));
  }
  for (size_t s = 0; s < reference.state.size(); ++s) {
    const auto [mine, theirs] =
        std::mismatch(outcome.state[s].begin(), outcome.state[s].end(), reference.state[s].begin());
    if (mine == outcome.state[s].end()) continue;
    return absl::StrCat(reference.arrays[s], " element ", mine - outcome.state[s].begin(), ": ",
                        std::bit_cast<float>(*mine), ", not ", std::bit_cast<float>(*theirs));
  }
  if (outcome.evaluation != reference.evaluation)
    return absl::StrCat("evaluation ", outcome.evaluation, ", not ", reference.evaluation);
  return "";
}

}  // namespace ebb::testing

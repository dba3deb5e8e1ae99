#include "random_model.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ebb/sharding/layout.h"
#include "ebb/sharding/memory_model.h"
#include "ebb/sharding/scopes.h"
#include "tests/full.h"

namespace ebb::sharding {
namespace {

// Mostly declared order; units visited again here and there; now and then no order at all.
std::vector<Visit> RandomForward(Random& random, int units) {
  std::vector<Visit> forward;
  for (int u = 0; u < units; ++u) forward.push_back({.unit = static_cast<UnitId>(u)});
  const int64_t again = random.OneIn(2) ? 0 : random.Between(1, units + 1);
  for (int64_t i = 0; i < again; ++i) {
    const int64_t from = random.Between(0, std::ssize(forward) - 1);
    const int64_t to = random.OneIn(3) ? from : random.Between(0, std::ssize(forward));
    forward.insert(forward.begin() + to, forward[from]);
  }
  if (random.OneIn(3)) {
    for (int64_t v = std::ssize(forward) - 1; v > 0; --v)
      std::swap(forward[v], forward[random.Between(0, v)]);
  }
  return forward;
}

}  // namespace

ParameterSpec RandomParameter(Random& random, int64_t elements_max) {
  ParameterSpec parameter{.name = "", .shape = {}, .init = Constant(0)};
  switch (random.Between(0, 5)) {
    case 0:
      return parameter;
    case 1:
      parameter.shape = {random.Between(1, elements_max)};
      break;
    case 2: {
      const int64_t rows = random.Between(1, 7);
      parameter.shape = {rows, random.Between(1, 9), random.Between(1, elements_max / 50 + 1)};
      break;
    }
    default: {
      const int64_t columns = random.OneOf<int64_t>({1, 3, 48, 64, 100, 128});
      parameter.shape = {random.Between(1, std::max<int64_t>(1, elements_max / columns)), columns};
    }
  }
  if (random.OneIn(4)) parameter.cut_rows = random.Between(1, 4);
  return parameter;
}

ModelSpec RandomModel(Random& random) {
  ModelSpec model;
  const int units = static_cast<int>(random.Between(1, 12));
  const int64_t elements_max = random.OneOf<int64_t>({60, 300, 5'000, 5'000, 300'000});
  const int64_t frozen_in = random.OneOf<int64_t>({1, 2, 4, 1'000});
  for (int u = 0; u < units; ++u) {
    const UnitId unit = model.AddUnit(absl::StrCat("unit", u));
    const int64_t parameters = random.Between(1, 5);
    const bool mixed = random.OneIn(3), trainable = !random.OneIn(frozen_in);
    for (int64_t p = 0; p < parameters; ++p) {
      ParameterSpec parameter = RandomParameter(random, elements_max);
      parameter.name = absl::StrCat("unit", u, ".p", p);
      parameter.trainable = mixed ? random.OneIn(2) : trainable;
      model.Add(unit, std::move(parameter));
    }
  }
  model.forward = RandomForward(random, units);
  if (random.OneIn(2)) {
    const bool equal = random.OneIn(2);
    for (Visit& visit : model.forward)
      visit.output_bytes = equal ? 1'000 : random.Between(1, 5'000);
    if (random.OneIn(2)) model.forward.back().output_bytes = 0;
  }
  if (random.OneIn(3)) model.workspace_bytes = random.Between(1, 100'000);
  return model;
}

Config RandomConfig(Random& random) {
  using enum DType;
  Config config;
  config.ebb.micro_batches_per_round = random.OneOf<int64_t>({1, 1, 2, 4});
  config.gradient_accumulation_steps =
      config.ebb.micro_batches_per_round * random.OneOf<int64_t>({1, 1, 2, 3, 5});
  config.compute = random.OneOf({kFloat32, kBFloat16, kFloat16});
  if (random.OneIn(2)) config.communication = random.OneOf({kFloat32, kBFloat16, kFloat16});
  config.accumulation = random.OneOf({kFloat32, kFloat32, kBFloat16, kFloat16});
  config.gradient_clipping = random.OneOf({0.0, 0.0, 1.0});
  config.zero.stage = static_cast<int>(random.OneOf<int64_t>({0, 1, 2, 3, 3, 3}));
  config.zero.overlap_comm = !random.OneIn(8);
  if (random.OneIn(2)) config.zero.reduce_bucket_size = random.OneOf<int64_t>({1, 2'000, 1 << 29});
  if (random.OneIn(2))
    config.zero.allgather_bucket_size = random.OneOf<int64_t>({1, 2'000, 1 << 29});
  config.zero.prefetch_bucket_size = random.OneOf<int64_t>({0, 1'000, 50'000'000, 50'000'000});
  config.zero.param_persistence_threshold = random.OneOf<int64_t>({0, 0, 100, 100'000});
  if (random.OneIn(4)) config.zero.model_persistence_threshold = random.Between(0, 10'000);
  config.zero.max_live_parameters = random.OneOf<int64_t>({1, 3'000, 1 << 30, 1 << 30});
  config.zero.max_reuse_distance = random.OneOf<int64_t>({0, 5'000, 1 << 30, 1 << 30});
  config.ebb.reduce_at = random.OneOf({ReduceAt::kDefault, ReduceAt::kRound, ReduceAt::kStep});
  config.ebb.asynchronous_step = random.OneOf({AsynchronousStep::kAuto, AsynchronousStep::kAuto,
                                               AsynchronousStep::kLate, AsynchronousStep::kOff});
  config.ebb.check_overflow = random.OneIn(2);
  config.ebb.prefetch_depth = random.OneOf<int64_t>({0, 1, 1, 2, 5, INT64_MAX});
  if (random.OneIn(2)) {
    config.ebb.coalesce_bytes = random.OneOf<int64_t>({0, 1'000, 50'000, int64_t{1} << 40});
  }
  config.ebb.reshard_after_forward = !random.OneIn(3);
  config.ebb.deterministic_reduce = random.OneIn(4);
  return config;
}

int64_t BytesOn(Tier tier, const Plan& plan) {
  int64_t bytes = 0;
  for (const MemoryRow& row : PredictMemory(plan.table.bytes))
    bytes += row.tier == tier ? static_cast<int64_t>(row.predicted_bytes) : 0;
  return bytes;
}

namespace {

std::vector<ScopeEvent> RandomEvents(Random& random, const ModelSpec& model) {
  const int visits = static_cast<int>(model.forward.size());
  const bool has_boundaries = model.forward.front().output_bytes > 0;
  std::vector<ScopeEvent> scopes;  // as they open
  std::vector<int> cuts = {0, visits};
  if (!has_boundaries && random.OneIn(3))
    cuts.insert(cuts.begin() + 1, static_cast<int>(random.Between(0, visits)));
  const int first = FirstTrainableVisit(model);
  const int64_t segment = random.Between(1, 4), recomputes = random.OneOf<int64_t>({1, 2, 1'000});
  for (size_t w = 0; w + 1 < cuts.size(); ++w) {
    for (int v = cuts[w]; v < cuts[w + 1]; ++v)
      if (model.forward[static_cast<size_t>(v)].forward) scopes.push_back({.visit = v});
    const size_t backward = scopes.size();
    for (int end = cuts[w + 1]; end > cuts[w];) {
      const int begin = std::max(cuts[w], end - static_cast<int>(segment));
      if (random.OneIn(recomputes)) {
        for (int v = std::max(begin, first); v < end; ++v)
          scopes.push_back({.recompute = true, .visit = v});
      }
      for (int v = end - 1; v >= std::max(begin, first); --v)
        if (model.forward[static_cast<size_t>(v)].backward)
          scopes.push_back({.backward = true, .visit = v});
      end = begin;
    }
    if (!has_boundaries && random.OneIn(4) && scopes.size() > backward + 1) {
      const int64_t at = random.Between(static_cast<int64_t>(backward), std::ssize(scopes) - 2);
      std::swap(scopes[static_cast<size_t>(at)], scopes[static_cast<size_t>(at) + 1]);
    }
  }
  std::vector<ScopeEvent> events;
  for (const ScopeEvent& scope : scopes) {
    events.push_back(scope);
    events.push_back(scope);
    events.back().opens = false;
  }
  return events;
}

}  // namespace

void DeclareOrder(Random& random, ModelSpec& model) {
  // A change that the model does not allow is taken back.
  const auto change = [&](auto& what, auto value) {
    const auto before = std::exchange(what, std::move(value));
    if (!CheckOrder(model).ok()) what = before;
  };
  if (random.OneIn(2)) {
    for (Visit& visit : model.forward) {
      if (random.OneIn(3)) change(visit.gradients, false);
      if (random.OneIn(6)) change(visit.backward, false);
      if (random.OneIn(8)) change(visit.forward, false);
    }
  }
  if (random.OneIn(6)) return;
  for (int tries = 0; tries < 10 && model.order.empty(); ++tries)
    change(model.order, RandomEvents(random, model));
  // Some scopes close later.
  const int64_t moves = random.OneOf<int64_t>({0, 5, 20});
  for (int64_t i = 0; i < moves && !model.order.empty(); ++i) {
    const int64_t last = std::ssize(model.order) - 1, from = random.Between(0, last),
                  to = std::min(last, from + random.OneOf<int64_t>({1, 3, last}));
    if (model.order[static_cast<size_t>(from)].opens) continue;
    std::vector<ScopeEvent> moved = model.order;
    std::rotate(moved.begin() + from, moved.begin() + from + 1, moved.begin() + to + 1);
    change(model.order, std::move(moved));
  }
}

RandomCase::RandomCase(uint64_t seed_value, bool offloads, bool orders) : seed(seed_value) {
  Random random(seed);
  world = static_cast<int>(random.Between(1, 8));
  model = RandomModel(random);
  config = RandomConfig(random);
  const int group = static_cast<int>(random.Between(1, world));
  if (config.zero.stage > 0 && world % group == 0 && random.OneIn(2))
    config.ebb.shard_group = group;
  optimizer_states = static_cast<int>(random.Between(0, 2));
  own_optimizer = random.OneIn(4);
  if (!LayOut(model, world).ok() || !LayOut(model, shards()).ok()) {
    for (ParameterSpec& parameter : model.parameters) parameter.cut_rows = 0;
  }
  // Drawn apart, so that a seed is the case that it was without it.
  Random partition(~seed);
  const int ranks = static_cast<int>(partition.Between(2, 4));
  if (ranks < shards() && shards() % ranks == 0 && !partition.OneIn(3))
    config.zero.hpz_partition_size = ranks;
  TakeNorms();
  Random order(seed + 2'000'000);
  if (orders) DeclareOrder(order, model);
  if (offloads) Offload(random);
}

void RandomCase::MixDTypes() {
  if (model.forward.front().output_bytes > 0) return;
  Random random(seed + 3'000'000);
  for (ParameterSpec& parameter : model.parameters) {
    if (random.OneIn(3))
      parameter.compute = random.OneOf({DType::kFloat32, DType::kBFloat16, DType::kFloat16});
    // Without a loss scale an engine trains nothing in fp16.
    const bool unscaled = parameter.compute == DType::kFloat16 && config.compute != DType::kFloat16;
    if (parameter.trainable && unscaled) parameter.compute = std::nullopt;
    if (!parameter.trainable && random.OneIn(3)) parameter.compute = DType::kInt8;
    parameter.cut_rows = 0;
  }
  model = DivideByDType(std::move(model), config.compute);
  // These limits were for the model as it was.
  config.ebb.host_memory.reset();
  config.ebb.device_memory.reset();
  config.zero.offload_param.buffer_size.reset();
}

void RandomCase::EncodeStates() {
  if (own_optimizer || TakesNorms() || optimizer_states == 0) return;
  Random random(seed + 4'000'000);
  const bool blocks = !random.OneIn(3);
  state_encodings.assign(static_cast<size_t>(optimizer_states),
                         blocks ? kDynamic8 : Encoding(DType::kBFloat16));
  if (!blocks) return;
  for (ParameterSpec& parameter : model.parameters) parameter.cut_rows = 0;
  config.ebb.host_memory.reset();
  config.ebb.device_memory.reset();
  config.zero.offload_param.buffer_size.reset();
  model = DivideByDType(
      std::move(model), config.compute,
      {.elements = kScaleBlock, .least_size = random.OneIn(2) ? 0 : random.Between(0, 2'000)});
}

void RandomCase::UpdateMatrices() {
  if (own_optimizer || TakesNorms()) return;
  Random random(seed + 5'000'000);
  config.optimizer.type = OptimizerType::kMuon;
  config.optimizer.newton_schulz_dtype = random.OneIn(3) ? DType::kFloat32 : DType::kBFloat16;
  optimizer_states = 2;
  const bool some = random.OneIn(2);
  for (ParameterSpec& parameter : model.parameters) {
    parameter.cut_rows = 0;
    if (parameter.shape.size() < 2 || (some && random.OneIn(3))) continue;
    parameter.matrix_update = MatrixUpdate::kYes;
    const int64_t rows = parameter.shape[parameter.shape.size() - 2];
    if (rows > 1 && random.OneIn(3)) parameter.matrix_rows = {1, rows - 1};
  }
  config.ebb.host_memory.reset();
  config.ebb.device_memory.reset();
  config.zero.offload_param.buffer_size.reset();
  model = DivideByDType(std::move(model), config.compute);
}

// LAMB or LARS, for some parameters or for all, from random numbers of its own.
void RandomCase::TakeNorms() {
  Random random(seed + 1'000'000);
  if (own_optimizer || !random.OneIn(3)) return;
  config.optimizer.type = optimizer_states == 2 ? OptimizerType::kLamb : OptimizerType::kLars;
  config.optimizer.momentum = optimizer_states == 1 ? 0.9 : 0;
  if (optimizer_states == 0 || random.OneIn(2)) return;
  OptimizerConfig other = {.type = optimizer_states == 2 ? OptimizerType::kAdamW
                                                         : OptimizerType::kLion};
  if (random.OneIn(3)) other = {.type = OptimizerType::kLars, .momentum = 0.9};
  config.ebb.parameter_groups["other"].optimizer = other;
  const bool units = random.OneIn(2);
  for (const UnitSpec& unit : model.units) {
    const bool whole = random.OneIn(2);
    for (ParameterId id : unit.parameters) {
      if (units ? whole : random.OneIn(2))
        model.parameters[static_cast<size_t>(id)].group = "other";
    }
  }
}

void RandomCase::Offload(Random& random) {
  using enum Tier;
  if (config.zero.stage == 0) config.zero.stage = 3;
  OffloadParamConfig& parameters = config.zero.offload_param;
  OffloadOptimizerConfig& optimizer = config.zero.offload_optimizer;
  if (config.zero.stage == 3) parameters.device = random.OneOf({kDevice, kCpu, kNvme, kNvme});
  optimizer.device = random.OneOf({kDevice, kCpu, kNvme, kNvme});
  if (config.parameter_tier() == kDevice && optimizer.device == kDevice) optimizer.device = kNvme;
  // Early updates share reads with gathers, if everything is on NVMe.
  if (random.OneIn(4)) {
    config.zero.stage = 3;
    parameters.device = optimizer.device = kNvme;
    config.gradient_clipping = 0;
    config.ebb.check_overflow = false;
    config.ebb.asynchronous_step = AsynchronousStep::kAuto;
    config.ebb.coalesce_bytes = random.OneOf<int64_t>({0, 0, 1'000, 50'000});
    config.zero.param_persistence_threshold = 0;
  }
  if (random.OneIn(3)) config.ebb.offload_gradients = random.OneOf({kDevice, kCpu, kNvme, kNvme});
  if (random.OneIn(2)) config.ebb.offload_activations = random.OneOf({kCpu, kNvme});
  optimizer.ratio = random.OneOf({1.0, 1.0, 0.7, 0.3, 0.0});
  optimizer.buffer_count = random.Between(1, 5);
  parameters.buffer_count = random.Between(1, 6);
  if (config.compute == DType::kBFloat16) {
    config.ebb.split_master = random.OneIn(2);
    config.ebb.stochastic_rounding = !config.ebb.split_master && random.OneIn(2);
  }

  const absl::StatusOr<ModelLayout> layout = LayOut(model, shards());
  if (!layout.ok()) return;
  const int64_t size = SizeOf(config.compute);
  int64_t largest = 0, slot = 1, all = 0;
  for (const UnitLayout& unit : layout->units) {
    largest = std::max(largest, unit.trainable.shard);
    slot = std::max(
        slot,
        (SwapAligned(unit.trainable.shard * size) + SwapAligned(unit.frozen.shard * size)) / size);
    all += unit.shard();
  }
  // Room for the largest unit, or little more: groups of units share a slot of it.
  if (random.OneIn(2)) parameters.buffer_size = slot + random.Between(0, slot);
  parameters.max_in_cpu = random.OneOf<int64_t>({0, 0, random.Between(0, all), 1'000'000'000});
  // A few sub-groups for the largest unit; cuts fall where they may.
  if (!random.OneIn(3)) config.zero.sub_group_size = largest / random.Between(1, 8) + 1;
  if (!random.OneIn(3)) return;
  // A budget with room for some of the states, or with less than is wanted.
  const absl::StatusOr<Plan> plan = PlanStep(inputs());
  if (!plan.ok()) return;
  const int64_t bytes = BytesOn(kCpu, *plan);
  config.ebb.host_memory = bytes + random.Between(-bytes / 4, plan->decisions.BytesBeside(0, all));
  if (!PlanStep(inputs()).ok()) config.ebb.host_memory = bytes;
}

OptimizerType RandomCase::OptimizerOf(ParameterId id) const {
  const auto group = config.ebb.parameter_groups.find(model[id].group);
  return group == config.ebb.parameter_groups.end() ? config.optimizer.type
                                                    : group->second.optimizer->type;
}

bool RandomCase::TakesNorms() const {
  for (const UnitSpec& unit : model.units) {
    for (ParameterId id : unit.parameters) {
      if (!own_optimizer && model[id].trainable && ebb::TakesNorms(OptimizerOf(id))) return true;
    }
  }
  return false;
}

std::string RandomCase::description() const {
  const auto forward = absl::StrJoin(model.forward, " ", [](std::string* out, const Visit& visit) {
    absl::StrAppend(out, static_cast<int>(visit.unit), visit.forward ? "" : "-forward",
                    visit.backward ? "" : "-backward", visit.gradients ? "" : "-gradients");
  });
  const auto order = absl::StrJoin(model.order, " ", [](std::string* out, const ScopeEvent& event) {
    absl::StrAppend(out, event.opens ? "" : "/",
                    event.backward    ? "B"
                    : event.recompute ? "R"
                                      : "F",
                    event.visit);
  });
  const auto name = [](auto value) {
    const std::string_view text = Name(value);
    return std::string(text);
  };
  return absl::StrCat(
      "seed ", seed, ": world ", world, " in groups of ", shards(), ", of which ",
      config.zero.hpz_partition_size, " hold secondary shards, stage ", config.zero.stage, ", ",
      model.units.size(), " units visited ", forward,
      order.empty() ? "" : absl::StrCat(" in the order ", order), ", accumulation steps ",
      config.gradient_accumulation_steps, ", micro-batches per round ",
      config.ebb.micro_batches_per_round, ", reduces at ",
      config.reduces_at_round() ? "round" : "step", ", dtypes ", name(config.compute), " ",
      name(config.communication_dtype()), " ", name(config.accumulation), ", prefetch depth ",
      config.ebb.prefetch_depth, " elements ", config.zero.prefetch_bucket_size, ", live ",
      config.zero.max_live_parameters, ", reuse ", config.zero.max_reuse_distance, ", persistence ",
      config.zero.param_persistence_threshold, ", coalesce ",
      config.ebb.coalesce_bytes.value_or(-1), ", reshard after forward ",
      config.ebb.reshard_after_forward, ", parameters ", name(config.parameter_tier()),
      " of which in cpu ", config.zero.offload_param.max_in_cpu, " in ",
      config.zero.offload_param.buffer_count, " buffers, optimizer ", name(config.optimizer_tier()),
      " ratio ", config.zero.offload_optimizer.ratio, ", gradients ", name(config.gradient_tier()),
      config.ebb.offload_gradients ? "" : " (follow)", ", activations ",
      name(config.activation_tier()), ", sub-groups ", config.zero.sub_group_size, ", host memory ",
      config.ebb.host_memory.value_or(-1), ", split masters ", config.ebb.split_master,
      ", stochastic rounding ", config.ebb.stochastic_rounding, ", states ", optimizer_states,
      state_encodings.empty()        ? ""
      : state_encodings[0].block > 0 ? " in blocks"
                                     : " in bf16",
      own_optimizer ? ", own optimizer" : "", TakesNorms() ? ", norms" : "", ", clipping ",
      config.gradient_clipping, ", checks ", config.ebb.check_overflow, ", asynchronous step ",
      static_cast<int>(config.ebb.asynchronous_step));
}

int Cases(int count) {
  return testing::Full() ? 20 * count : count;
}

}  // namespace ebb::sharding

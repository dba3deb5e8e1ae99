#include "ebb/runtime/engine/norm_exchange.h"

#include <algorithm>
#include <cstring>

#include "ebb/runtime/config/status_macros.h"
#include "ebb/sharding/plan_facts.h"

namespace ebb {
namespace {

void AddSums(const optim::NormSums& part, optim::NormSums& total) {
  optim::Add(optim::Pack(part.parameter), total.parameter);
  optim::Add(optim::Pack(part.direction), total.direction);
}

}  // namespace

absl::Status NormExchange::Create(const Device& device, const sharding::Plan& plan,
                                  const UpdateTable& table, int shard,
                                  std::optional<NormExchange>& into) {
  NormExchange& made = into.emplace();
  made.layout_ = sharding::NormRecordsOf(plan);
  made.shards_ = sharding::Slices(plan);
  for (const sharding::Operation& operation : plan.operations) {
    if (operation.kind != sharding::OperationKind::kParameterNorms) continue;
    const bool on_host = operation.stream == sharding::StreamId::kHostUpdate;
    (on_host ? made.sums_on_host_ : made.sums_on_device_) = true;
  }
  made.totals_.resize(table.sets().size());
  for (size_t s = 0; s < table.sets().size(); ++s) {
    const std::optional<ParameterId> id = table.sets()[s].parameter;
    if (!id) continue;
    const sharding::ParameterLocation& at = plan.layout.parameters[static_cast<size_t>(*id)];
    const sharding::Section& section = plan.layout.units[static_cast<size_t>(at.unit)].trainable;
    const int first = made.layout_.first[static_cast<size_t>(at.unit)];
    Parameter parameter{.set = static_cast<int64_t>(s)};
    const auto first_slice = static_cast<int>(at.offset / section.shard),
               last_slice = static_cast<int>((at.offset + at.elements - 1) / section.shard);
    for (int slice = first_slice; made.layout_.exchanged && slice <= last_slice; ++slice) {
      const int entry = first + sharding::NormEntryOf(plan, at.unit, slice, *id);
      parameter.sources.push_back({.rank = slice, .entry = entry});
      if (slice == shard) parameter.entry = entry;
    }
    made.parameters_.push_back(std::move(parameter));
    made.norms_.push_back({.set = static_cast<int64_t>(s)});
  }
  const size_t sums = made.totals_.size() * sizeof(optim::NormSums);
  const auto record = static_cast<size_t>(made.layout_.exchanged ? made.layout_.bytes() : 0);
  const size_t all = record * static_cast<size_t>(made.shards_);
  EBB_ASSIGN_OR_RETURN(
      made.memory_,
      device.AllocateShared(std::max<int64_t>(1, static_cast<int64_t>(sums + record + all)),
                            "norms of parameters"));
  std::byte* const memory = made.memory_.data();
  std::memset(memory, 0, sums + record + all);
  made.device_sums_ = {reinterpret_cast<optim::NormSums*>(memory), made.totals_.size()};
  made.own_record_ = {memory + sums, record};
  made.records_ = {memory + sums + record, all};
  return absl::OkStatus();
}

void NormExchange::Complete(std::span<const optim::NormSums> on_host, int64_t exchange,
                            bool failed) {
  for (const Parameter& parameter : parameters_) {
    const auto set = static_cast<size_t>(parameter.set);
    optim::NormSums& total = totals_[set] = {};
    if (failed) continue;
    if (sums_on_device_) AddSums(device_sums_[set], total);
    if (sums_on_host_) AddSums(on_host[set], total);
  }
  if (!exchanged()) return;
  HeaderOf(own_record_) = {.exchange = exchange, .failed = failed ? 1 : 0};
  for (const Parameter& parameter : parameters_) {
    const optim::NormSums& total = totals_[static_cast<size_t>(parameter.set)];
    EntryOf(own_record_, parameter.entry) = {.parameter = optim::Pack(total.parameter),
                                             .direction = optim::Pack(total.direction)};
  }
}

bool NormExchange::Conclude(int64_t exchange) {
  for (int rank = 0; exchanged() && rank < shards_; ++rank) {
    const Header& header = HeaderOf(RecordOf(rank));
    if (header.exchange != exchange || header.failed != 0) return false;
  }
  for (size_t p = 0; p < parameters_.size(); ++p) {
    const Parameter& parameter = parameters_[p];
    optim::NormSums total = {};
    if (!exchanged()) total = totals_[static_cast<size_t>(parameter.set)];
    for (const Source& source : parameter.sources) {
      const Entry& entry = EntryOf(RecordOf(source.rank), source.entry);
      optim::Add(entry.parameter, total.parameter);
      optim::Add(entry.direction, total.direction);
    }
    norms_[p].parameter_squares = optim::Rounded(total.parameter);
    norms_[p].direction_squares = optim::Rounded(total.direction);
  }
  return true;
}

}  // namespace ebb

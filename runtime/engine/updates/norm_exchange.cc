#include "ebb/runtime/engine/updates/norm_exchange.h"

#include <optional>
#include <utility>

#include "ebb/sharding/plan_facts.h"

namespace ebb {
namespace {

void AddSums(const optim::NormSums& part, optim::NormSums& total) {
  optim::Add(optim::Pack(part.parameter), total.parameter);
  optim::Add(optim::Pack(part.direction), total.direction);
}

}  // namespace

NormExchange::NormExchange(const sharding::Plan& plan, const ModelSpec& model,
                           const UpdateTable& table, int shard, const ControlBlock& control)
    : layout_(sharding::NormRecordsOf(plan)), control_(control), totals_(table.sets().size()) {
  for (size_t s = 0; s < table.sets().size(); ++s) {
    const std::optional<ParameterId> id = table.sets()[s].parameter;
    if (!id) continue;
    const sharding::ParameterLocation& at = plan.layout.parameters[static_cast<size_t>(*id)];
    const sharding::Section& section = plan.layout.units[static_cast<size_t>(at.unit)].trainable;
    const int first = layout_.first[static_cast<size_t>(at.unit)];
    Parameter parameter{.set = static_cast<int64_t>(s)};
    const bool is_whole_here = plan.decisions.stage == 0;
    const auto first_slice = is_whole_here ? 0 : static_cast<int>(at.offset / section.shard),
               last_slice = is_whole_here
                                ? 0
                                : static_cast<int>((at.offset + at.elements - 1) / section.shard);
    // A parameter that is whole on all tensor ranks counts once.
    const int blocks = model[*id].block ? layout_.tensor_ranks : 1;
    for (int slice = first_slice; layout_.exchanged() && slice <= last_slice; ++slice) {
      const int entry = first + sharding::NormEntryOf(plan, at.unit, slice, *id);
      for (int tensor = 0; tensor < blocks; ++tensor)
        parameter.sources.push_back(
            {.rank = slice * layout_.tensor_ranks + tensor, .entry = entry});
      if (slice == shard || is_whole_here) parameter.entry = entry;
    }
    parameters_.push_back(std::move(parameter));
    norms_.push_back({.set = static_cast<int64_t>(s)});
  }
}

void NormExchange::Complete(bool on_device, const optim::NormSums* on_host, int64_t exchange,
                            bool failed) {
  for (const Parameter& parameter : parameters_) {
    const auto set = static_cast<size_t>(parameter.set);
    optim::NormSums& total = totals_[set] = {};
    if (failed) continue;
    if (on_device) AddSums(control_.norm_sums()[set], total);
    if (on_host != nullptr) AddSums(on_host[set], total);
  }
  if (!layout_.exchanged()) return;
  HeaderOf(control_.norm_record()) = {.exchange = exchange, .failed = failed ? 1 : 0};
  for (const Parameter& parameter : parameters_) {
    const optim::NormSums& total = totals_[static_cast<size_t>(parameter.set)];
    EntryOf(control_.norm_record(), parameter.entry) = {.parameter = optim::Pack(total.parameter),
                                                        .direction = optim::Pack(total.direction)};
  }
}

bool NormExchange::Conclude(int64_t exchange) {
  for (int rank = 0; layout_.exchanged() && rank < layout_.ranks; ++rank) {
    const Header& header = HeaderOf(RecordOf(rank));
    if (header.exchange != exchange || header.failed != 0) return false;
  }
  for (size_t p = 0; p < parameters_.size(); ++p) {
    const Parameter& parameter = parameters_[p];
    optim::NormSums total = {};
    if (!layout_.exchanged()) total = totals_[parameter.set];
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

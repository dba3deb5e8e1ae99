#include "ebb/sharding/lower/lower_updates.h"

#include <algorithm>
#include <cassert>
#include <iterator>
#include <utility>

#include "ebb/sharding/fingerprint.h"
#include "ebb/sharding/lower/lower_records.h"
#include "ebb/sharding/norm_records.h"

namespace ebb::sharding {
UpdateLowering::UpdateLowering(const PassInputs& in, const SwapIns& swap_ins, OpWriter& writer)
    : in_(in),
      swap_ins_(swap_ins),
      d_(in.plan.decisions),
      writer_(writer),
      to_(writer.operands()),
      table_(in.plan.table) {}

void UpdateLowering::ReadStates(int sub_group) {
  const int unit = table_.sub_groups[static_cast<size_t>(sub_group)].unit;
  const bool carried = swap_ins_.carried[static_cast<size_t>(unit)];
  const int swap_in =
      carried || d_.reads_parameters(unit) ? swap_ins_.of_update[static_cast<size_t>(unit)] : -1;
  Route route = RouteOf(sub_group, swap_in);
  route.carried = carried;
  TakeSlots(swap_in, route);
  Read(route);
  read_.emplace(sub_group, route);
}

void UpdateLowering::Update(int sub_group) {
  Route route = read_.extract(sub_group).mapped();
  Bring(route);
  AddArrays(route, Access::kReadWrite, d_.writes_parameters(route.unit));
  const UpdateDetail detail = DetailOf(route);
  AddConstants(route, detail.early);
  if (d_.own_optimizer) AddOwnStaging(route);
  const int64_t count = GroupOf(route).count();
  const int64_t parameter =
      (d_.writes_parameters(route.unit) ? SizeOf(d_.compute_of(route.unit)) : 0) *
      (d_.reads_parameters(route.unit) ? 2 : 1);
  writer_.Issue({.role = Role::kUpdate,
                 .stream = route.stream(),
                 .parts = {{.unit = route.unit}},
                 .bytes = 2 * d_.BytesBeside(route.unit, count) +
                          count * (SizeOf(d_.shard_dtype(route.unit)) + parameter),
                 .when = route.carried ? When::kCarrying : When::kAlways,
                 .updates = {detail}});
  WriteBack(route);
}

void UpdateLowering::TakeNorms(int sub_group) {
  Route route = RouteOf(sub_group, /*swap_in=*/-1);
  route.states = d_.norm_states[route.unit];
  // Read where it is the master or a half of it, and never written.
  route.moves_parameter = route.moves_parameter && d_.reads_parameters(route.unit);
  TakeSlots(/*swap_in=*/-1, route);
  Read(route);
  Bring(route);
  const bool is_first = !std::exchange(norms_begun_[route.on_host ? 1 : 0], true);
  AddArrays(route, Access::kRead, d_.reads_parameters(route.unit));
  to_.AddBytes(NormSums(in_.plan, route.on_host), is_first ? Access::kWrite : Access::kReadWrite,
               LayOutNormRecords(in_.plan.layout, d_).sums * kNormSumsBytes);
  AddConstants(route, /*early=*/false);
  const int64_t count = GroupOf(route).count(),
                parameter = d_.reads_parameters(route.unit) ? SizeOf(d_.compute_of(route.unit)) : 0;
  int64_t bytes =
      d_.MasterBytes(route.unit, count) + count * (SizeOf(d_.shard_dtype(route.unit)) + parameter);
  for (int k = 0; k < route.states; ++k) bytes += d_.StateBytes(route.unit, k, count);
  writer_.Issue({.role = Role::kParameterNorms,
                 .stream = route.stream(),
                 .parts = {{.unit = route.unit, .first = is_first}},
                 .bytes = bytes,
                 .updates = {DetailOf(route)}});
}

void UpdateLowering::BeginMatrices(int unit) {
  for (const int g : table_.SubGroupNumbersOf(unit)) FindDirection(g);
  if (d_.exchanges_matrices()) ExchangeMatrices(Role::kToOwners, unit, begun_matrices_);
  ++begun_matrices_;
}

void UpdateLowering::EndMatrices(int unit) {
  Orthogonalise(unit);
  if (d_.exchanges_matrices()) ExchangeMatrices(Role::kFromOwners, unit, ended_matrices_);
  for (const int g : table_.SubGroupNumbersOf(unit)) ApplyDirection(g);
  ++ended_matrices_;
}

Place UpdateLowering::DirectionPlace(const Route& route, bool on_host, int64_t turn) const {
  return table_.TurnOf(table_.OnTier(Purpose::kDirection, on_host), turn)
      .Plus(GroupOf(route).begin * SizeOf(d_.direction));
}

// The direction takes the place of a master that is only written. If directions are not fp32, it is
// also written as a parameter is, rounded.
void UpdateLowering::FindDirection(int sub_group) {
  Route route = RouteOf(sub_group, /*swap_in=*/-1);
  route.has_master = route.moves_parameter = false;
  TakeSlots(/*swap_in=*/-1, route);
  Read(route);
  BringGradient(route);
  const int64_t count = GroupOf(route).count();
  const Place direction = DirectionPlace(route, route.on_host, begun_matrices_);
  const bool is_wide = d_.direction == DType::kFloat32;
  const int wide = table_.OnTier(Purpose::kWideDirection, route.on_host);
  to_.Add(route.gradient, d_.shard_dtype(route.unit), Access::kRead, count);
  to_.Add(is_wide ? direction : table_.PlaceOf(wide), DType::kFloat32, Access::kWrite, count);
  to_.Add(direction, d_.direction, Access::kWrite, is_wide ? 0 : count);
  for (int k = 0; k < route.states; ++k)
    to_.Add(StatePlace(route, k), d_.state_encoding(route.unit, k), Access::kReadWrite, count);
  const UpdateDetail detail = DetailOf(route);
  AddConstants(route, detail.early);
  int64_t bytes =
      count * (SizeOf(d_.shard_dtype(route.unit)) + 4 + (is_wide ? 0 : SizeOf(d_.direction)));
  for (int k = 0; k < route.states; ++k) bytes += 2 * d_.StateBytes(route.unit, k, count);
  writer_.Issue({.role = Role::kMomentum,
                 .stream = route.stream(),
                 .parts = {{.unit = route.unit}},
                 .bytes = bytes,
                 .updates = {detail}});
  WriteBack(route);
  if (route.on_host) {
    Copy(route, /*to_host=*/false, StateClass::kGradient, direction,
         DirectionPlace(route, /*on_host=*/false, begun_matrices_), d_.direction);
  }
}

void UpdateLowering::ExchangeMatrices(Role role, int unit, int64_t turn) {
  const std::vector<OwnedMatrix>& matrices = d_.matrices[unit];
  const int64_t shard = SectionOf(in_.plan, unit, true).shard;
  const Place direction =
      table_.TurnOf(table_.OnTier(Purpose::kDirection, /*on_host=*/false), turn);
  const Place owned = table_.TurnOf(table_.Find(Purpose::kMatrices), turn);
  if (role == Role::kToOwners) {
    to_.Add(direction, d_.direction, Access::kRead, shard);
    to_.Add(owned, d_.direction, Access::kWrite, OwnedElements(matrices));
  } else {
    to_.Add(owned, d_.direction, Access::kRead, OwnedElements(matrices));
    to_.Add(direction, d_.direction, Access::kReadWrite, shard);
  }
  writer_.Issue({.role = role,
                 .stream = StreamId::kReduce,
                 .parts = {{.unit = unit}},
                 .bytes = ExchangedElements(matrices, shard, d_.shards) * SizeOf(d_.direction)});
}

void UpdateLowering::Orthogonalise(int unit) {
  const std::vector<OwnedMatrix>& matrices = d_.matrices[unit];
  const bool is_exchanged = d_.exchanges_matrices();
  const int row = is_exchanged ? table_.Find(Purpose::kMatrices)
                               : table_.OnTier(Purpose::kDirection, /*on_host=*/false);
  const int scratch = table_.Find(Purpose::kIteration);
  const Section& section = SectionOf(in_.plan, unit, true);
  const int64_t elements = is_exchanged    ? OwnedElements(matrices)
                           : d_.stage == 0 ? section.elements
                                           : section.shard;
  to_.Add(table_.TurnOf(row, ended_matrices_), d_.direction, Access::kReadWrite, elements);
  to_.AddBytes(table_.PlaceOf(scratch), Access::kWrite, table_[scratch].elements);
  writer_.Issue({.role = Role::kOrthogonalise,
                 .stream = StreamId::kUpdate,
                 .parts = {{.unit = unit}},
                 .bytes = 2 * elements * SizeOf(d_.direction)});
}

void UpdateLowering::ApplyDirection(int sub_group) {
  Route route = RouteOf(sub_group, /*swap_in=*/-1);
  route.states = 0;
  route.moves_gradient = false;
  const Place on_device = DirectionPlace(route, /*on_host=*/false, ended_matrices_);
  route.gradient = DirectionPlace(route, route.on_host, ended_matrices_);
  if (route.on_host)
    Copy(route, /*to_host=*/true, StateClass::kGradient, on_device, route.gradient, d_.direction);
  TakeSlots(/*swap_in=*/-1, route);
  Read(route);
  BringParameter(route);
  AddArrays(route, Access::kReadWrite, d_.writes_parameters(route.unit));
  const UpdateDetail detail = DetailOf(route);
  AddConstants(route, detail.early);
  const int64_t count = GroupOf(route).count();
  const int64_t parameter =
      (d_.writes_parameters(route.unit) ? SizeOf(d_.compute_of(route.unit)) : 0) *
      (d_.reads_parameters(route.unit) ? 2 : 1);
  writer_.Issue(
      {.role = Role::kUpdate,
       .stream = route.stream(),
       .parts = {{.unit = route.unit}},
       .bytes = 2 * d_.MasterBytes(route.unit, count) + count * (SizeOf(d_.direction) + parameter),
       .updates = {detail}});
  WriteBack(route);
}

UpdateLowering::Route UpdateLowering::RouteOf(int sub_group, int swap_in) const {
  const SubGroup& group = table_.sub_groups[static_cast<size_t>(sub_group)];
  Route route{.unit = group.unit,
              .sub_group = sub_group,
              .states = d_.states_of(group.unit),
              .has_master = d_.keeps_master(group.unit),
              .on_host = group.tier != Tier::kDevice,
              .swaps = group.tier == Tier::kNvme};
  const int gradient = table_.Find(Purpose::kGradientShard, group.unit);
  route.moves_gradient = table_.TierOf(gradient) != route.here();
  route.gradient = table_.PlaceOf(gradient, group.begin);
  route.master = StoredPlace(route, Purpose::kMaster);
  if (!d_.writes_parameters(route.unit)) return route;
  route.parameter_place = StoredPlace(route, Purpose::kParameter);
  route.parameter = route.parameter_place;
  route.moves_parameter = route.parameter_place.tier != route.here();
  route.in_parameter_slot =
      route.moves_parameter && route.parameter_place.tier == Tier::kNvme && swap_in >= 0;
  return route;
}

Place UpdateLowering::StoredPlace(const Route& route, Purpose purpose, int state) const {
  return table_.PlaceOfSubGroup(table_.Find(purpose, route.unit, /*trainable=*/true, state),
                                route.sub_group);
}

Place UpdateLowering::StatePlace(const Route& route, int state) const {
  return route.swaps ? SlotPlace(route, /*on_host=*/true, Purpose::kWorkState, state)
                     : StoredPlace(route, Purpose::kState, state);
}

Place UpdateLowering::SlotPlace(const Route& route, bool on_host, Purpose part, int state) const {
  return table_.TurnOf(table_.OnTier(part, on_host, state),
                       on_host ? route.host_turn : route.device_turn);
}

void UpdateLowering::TakeSlots(int swap_in, Route& route) {
  // Parameters on NVMe pass through host memory also if the update runs on the device.
  const bool parameter_in_host = route.moves_parameter && !route.in_parameter_slot &&
                                 (route.on_host || route.parameter_place.tier == Tier::kNvme);
  const bool gradient_in_host =
      route.on_host ? route.moves_gradient : route.gradient.tier == Tier::kNvme;
  if (route.swaps || gradient_in_host || parameter_in_host) route.host_turn = next_turn_[1]++;
  if (!route.on_host && (route.moves_gradient || route.moves_parameter))
    route.device_turn = next_turn_[0]++;
  route.host_parameter = route.in_parameter_slot
                             ? InSlot(in_.plan, swap_ins_.reads[static_cast<size_t>(swap_in)],
                                      route.unit, true, GroupOf(route).begin)
                             : SlotPlace(route, /*on_host=*/true, Purpose::kWorkParameter);
  if (!route.swaps) return;
  if (swap_ins_.shares_masters(route.sub_group)) {
    route.master = table_.TurnOf(table_.Find(Purpose::kMasterSlot),
                                 swap_ins_.master_slot[static_cast<size_t>(route.sub_group)]);
  } else if (route.has_master) {
    route.master = SlotPlace(route, /*on_host=*/true, Purpose::kWorkMaster);
  }
}

void UpdateLowering::Read(const Route& route) {
  int64_t bytes = 0;
  if (route.swaps && route.has_master && !swap_ins_.shares_masters(route.sub_group))
    bytes += to_.Move(StateClass::kMaster, StoredPlace(route, Purpose::kMaster), route.master,
                      SwappedBytes(route, d_.master_encoding(route.unit)));
  for (int k = 0; route.swaps && k < route.states; ++k)
    bytes += to_.Move(StateClass::kOptimizer, StoredPlace(route, Purpose::kState, k),
                      StatePlace(route, k), SwappedBytes(route, d_.state_encoding(route.unit, k)));
  const bool is_there = route.in_parameter_slot && !route.carried;
  if (route.moves_parameter && d_.reads_parameters(route.unit) && !is_there &&
      route.parameter_place.tier == Tier::kNvme)
    bytes += to_.Move(StateClass::kParameter, route.parameter_place, route.host_parameter,
                      SwappedBytes(route, d_.compute_of(route.unit)));
  Transfer(route, Role::kRead, StreamId::kReadStates, bytes);
}

void UpdateLowering::Bring(Route& route) {
  BringGradient(route);
  BringParameter(route);
}

void UpdateLowering::BringGradient(Route& route) {
  const DType dtype = d_.shard_dtype(route.unit);
  if (route.gradient.tier == Tier::kNvme) {
    const Place in_host = SlotPlace(route, /*on_host=*/true, Purpose::kWorkGradient);
    Transfer(route, Role::kRead, StreamId::kReadStates,
             to_.Move(StateClass::kGradient, route.gradient, in_host, SwappedBytes(route, dtype)));
    route.gradient = in_host;
  }
  if (!route.moves_gradient || route.gradient.tier == route.here()) return;
  const Place to = SlotPlace(route, route.on_host, Purpose::kWorkGradient);
  Copy(route, route.on_host, StateClass::kGradient, route.gradient, to, dtype);
  route.gradient = to;
}

void UpdateLowering::BringParameter(Route& route) {
  if (!route.moves_parameter) return;
  const bool of_file = route.parameter_place.tier == Tier::kNvme;
  route.parameter = route.on_host && of_file
                        ? route.host_parameter
                        : SlotPlace(route, route.on_host, Purpose::kWorkParameter);
  // The parameter is read as the master or half of it. Here it has come from the swap file already.
  if (!d_.reads_parameters(route.unit) || (route.on_host && of_file)) return;
  Copy(route, route.on_host, StateClass::kParameter,
       of_file ? route.host_parameter : route.parameter_place, route.parameter,
       d_.compute_of(route.unit));
}

// Carries the new parameters from the update to their place.
void UpdateLowering::WriteBack(const Route& route) {
  const Place& place = route.parameter_place;
  const bool of_file = place.tier == Tier::kNvme;
  const DType dtype = d_.compute_of(route.unit);
  if (route.moves_parameter && (!route.on_host || place.tier == Tier::kDevice))
    Copy(route, /*to_host=*/!route.on_host, StateClass::kParameter, route.parameter,
         of_file ? route.host_parameter : place, dtype);
  int64_t bytes = 0;
  if (route.swaps && route.has_master)
    bytes += to_.Move(StateClass::kMaster, route.master, StoredPlace(route, Purpose::kMaster),
                      SwappedBytes(route, d_.master_encoding(route.unit)));
  for (int k = 0; route.swaps && k < route.states; ++k)
    bytes += to_.Move(StateClass::kOptimizer, StatePlace(route, k),
                      StoredPlace(route, Purpose::kState, k),
                      SwappedBytes(route, d_.state_encoding(route.unit, k)));
  if (route.moves_parameter && of_file)
    bytes +=
        to_.Move(StateClass::kParameter, route.host_parameter, place, SwappedBytes(route, dtype));
  Transfer(route, Role::kWrite, StreamId::kWrite, bytes);
}

// One operation for the moves that have been written, if there are any.
void UpdateLowering::Transfer(const Route& route, Role role, StreamId stream, int64_t bytes) {
  if (bytes == 0) return;
  writer_.Issue({.role = role,
                 .stream = stream,
                 .parts = {{.unit = route.unit}},
                 .bytes = bytes,
                 .when = route.carried ? When::kCarrying : When::kAlways,
                 .repeats = false});  // a sub-group's own places
}

void UpdateLowering::Copy(const Route& route, bool to_host, StateClass state, const Place& from,
                          const Place& to, Encoding encoding) {
  Transfer(route, to_host ? Role::kDownload : Role::kUpload,
           to_host ? StreamId::kDownload : StreamId::kUpload,
           to_.Move(state, from, to, encoding.bytes(GroupOf(route).count())));
}

int64_t UpdateLowering::SwappedBytes(const Route& route, Encoding encoding) const {
  return SwapAligned(encoding.bytes(GroupOf(route).count()));
}

// gradient, master, parameter, states.
void UpdateLowering::AddArrays(const Route& route, Access access, bool has_parameter) {
  const int64_t count = GroupOf(route).count();
  const bool of_matrices = d_.has_matrices(route.unit);
  to_.Add(route.gradient, of_matrices ? d_.direction : d_.shard_dtype(route.unit), Access::kRead,
          count);
  const bool reads = d_.reads_parameters(route.unit);
  to_.Add(route.master, d_.master_encoding(route.unit), access, route.has_master ? count : 0);
  const Access of_parameter = !Writes(access) ? Access::kRead
                              : reads         ? Access::kReadWrite
                                              : Access::kWrite;
  to_.Add(route.parameter, d_.compute_of(route.unit), of_parameter, has_parameter ? count : 0);
  for (int k = 0; k < route.states; ++k)
    to_.Add(StatePlace(route, k), d_.state_encoding(route.unit, k), access, count);
}

// An optimizer of the trainer's gets one part of a parameter in fp32.
void UpdateLowering::AddOwnStaging(const Route& route) {
  int64_t longest = 0;
  for (const PlacedParameter& placement : SectionOf(in_.plan, route.unit, true).placements)
    longest = std::max(longest, std::min(placement.elements, GroupOf(route).count()));
  to_.Add(table_.PlaceOf(table_.OnTier(Purpose::kOwnGradient, route.on_host)), DType::kFloat32,
          Access::kWrite, longest);
  if (!d_.reads_parameters(route.unit)) return;
  to_.Add(table_.PlaceOf(table_.OnTier(Purpose::kOwnMaster, route.on_host)), DType::kFloat32,
          Access::kWrite, longest);
}

UpdateDetail UpdateLowering::DetailOf(const Route& route) const {
  const SubGroup& group = GroupOf(route);
  return {
      .sub_group = route.sub_group,
      .begin = group.begin,
      .end = group.end,
      .states = route.states,
      .early = d_.timing == UpdateTiming::kEarly && !route.carried,
      .keeps_parameter = route.moves_parameter && !d_.reads_parameters(route.unit),
      .per_slice = d_.stage == 0 ? 0 : SectionOf(in_.plan, route.unit, true).shard,
      .rounding_unit = Hasher().Add(in_.plan.unit_names[static_cast<size_t>(route.unit)]).hash()};
}

// The device has a copy of the host's constants.
void UpdateLowering::AddConstants(const Route& route, bool early) {
  const ControlCells& cells = to_.cells();
  const int64_t of_host = early ? cells.early() : cells.constants(),
                of_device = early ? cells.device_early() : cells.device_constants();
  to_.AddControl(route.on_host ? of_host : of_device, Access::kRead);
}

}  // namespace ebb::sharding

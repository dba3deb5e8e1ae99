// The ranks' exchange of norms of whole parameters before LAMB or LARS update them. Each rank sends
// the sums of its sub-groups to all ranks of the shard group (of a model that is cut over tensor
// ranks, to those too) in one record; the sums are on the
// device and in host memory, by set of constants (UpdateTable). The records give the squares of
// whole parameters. Sums are exact (optim/exact_sum.h), so neither cuts nor the order of ranks
// matter.
//
// All of it happens in the order of the reduce stream, as tasks of record_exchange.h, in the
// control block.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ebb/optim/parameter_norms.h"
#include "ebb/runtime/engine/outcome/control_block.h"
#include "ebb/runtime/engine/updates/update_table.h"
#include "ebb/sharding/norm_records.h"
#include "ebb/sharding/plan.h"

namespace ebb {

class NormExchange {
 public:
  // `shard`: this rank's slice of every unit. The control block outlives this.
  NormExchange(const sharding::Plan& plan, const ModelSpec& model, const UpdateTable& table,
               int shard, const ControlBlock& control);

  // Adds up this rank's sums, and writes its record of that exchange. `on_host`: null if the host
  // has none, as `on_device`: whether the control block has sums of the device. `failed`: sums are
  // void.
  void Complete(bool on_device, const optim::NormSums* on_host, int64_t exchange, bool failed);

  // False: some rank's record of that exchange has not come, or has no sums.
  bool Conclude(int64_t exchange);

  struct Norms {
    int64_t set = 0;
    double parameter_squares = 0, direction_squares = 0;
  };
  // After a Conclude that returned true: one for each set that takes norms.
  std::span<const Norms> norms() const { return norms_; }

 private:
  struct Header {
    int64_t exchange, failed;
  };
  // One entry of a record.
  struct Entry {
    optim::PackedSum parameter, direction;
  };
  struct Source {
    int rank = 0, entry = 0;  // of those that exchange; of its record
  };
  // A set that takes norms: this rank's entry, and the places of the parameter's parts.
  struct Parameter {
    int64_t set = 0;
    int entry = 0;
    std::vector<Source> sources = {};
  };

  Header& HeaderOf(std::span<std::byte> record) const {
    return *reinterpret_cast<Header*>(record.data());
  }
  Entry& EntryOf(std::span<std::byte> record, int entry) const {
    return *reinterpret_cast<Entry*>(record.data() + sharding::kNormHeaderBytes +
                                     entry * sharding::kNormEntryBytes);
  }
  std::span<std::byte> RecordOf(int rank) const {
    const auto bytes = static_cast<size_t>(layout_.bytes());
    return control_.norm_records().subspan(static_cast<size_t>(rank) * bytes, bytes);
  }

  static_assert(sizeof(Header) <= sharding::kNormHeaderBytes);
  static_assert(sizeof(Entry) == sharding::kNormEntryBytes);
  static_assert(sizeof(optim::NormSums) == sharding::kNormSumsBytes);

  const sharding::NormRecords layout_;
  const ControlBlock& control_;
  std::vector<Parameter> parameters_;
  std::vector<optim::NormSums> totals_;  // by set: this rank's
  std::vector<Norms> norms_;
};

}  // namespace ebb

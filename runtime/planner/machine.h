// The figures of one host and its GPUs, as a JSON file has them. All rates are sustained rates, not
// peak rates: gpu_teraflops is the rate of all of a trainer's kernels together, with attention and
// norms.
//
//   {"gpus": 8, "gpu_memory": "79.6GiB", "gpu_teraflops": 400, "gpu_memory_gb_s": 3000, ...}
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "ebb/sharding/report/machine_costs.h"

namespace ebb::planner {

struct Machine {
  std::string name = "";
  bool is_cpu = false;  // ranks compute on the host's cores, in its RAM
  // Bytes, gigabytes (10^9) a second and microseconds, as the keys say.
  double gpus = 1;  // of a host, and so its ranks
  double gpu_memory = 0,
         gpu_reserved = 0;        // for the driver, NCCL and fragmentation
  double gpu_teraflops = 0;       // of all ranks of the host, where is_cpu
  double gpu_peak_teraflops = 0;  // of its data sheet, in 16 bits without sparsity; 0: not known
  // Muon's products of large matrices have this rate, instead of gpu_teraflops; those of a matrix
  // with this smaller side have half of it.
  double newton_schulz_teraflops = 0, newton_schulz_half_side = 0;
  double gpu_memory_gb_s = 0;
  double link_gb_s = 0;     // of one GPU, each way, to other GPUs of the host
  double pcie_gb_s = 0;     // of one GPU, each way
  double network_gb_s = 0;  // of the host; 0: there is no other host
  double ram = 0, ram_gb_s = 0;
  double cores = 1, core_gb_s = 8;
  double sum_gb_s = 0;     // of a core in sums of gradients; 0: core_gb_s
  double update_gb_s = 0;  // of a core in updates; 0: core_gb_s
  double disk = 0, disk_read_gb_s = 0, disk_write_gb_s = 0, disk_both_gb_s = 0;  // 0: none
  double disk_tbw = 0;  // bytes that may be written to the disks in their life; 0: not known
  double launch_us = 5, collective_us = 20, collective_rank_us = 1, disk_us = 100;

  std::map<std::string, std::string> sources = {};  // of figures, by their keys
  int named_ranks = 0;  // as a name says: 16 of "16xh100"; 0: as many as GPUs
  // Ranks on a part of a host's GPUs have all of its RAM, cores and disks, not the same part of
  // these.
  bool whole_host = false;

  int ranks_per_host(int ranks) const;
  double rank_share(int ranks) const;
  double flops_of_rank(int ranks) const;
  double newton_schulz_flops_of_rank(int ranks) const;
  // Bytes of a rank's pools. On a CPU there is no device memory beside RAM.
  int64_t device_room(int ranks) const;
  int64_t ram_room(int ranks) const;  // without the rest of the process
  int64_t disk_room(int ranks) const;

  sharding::Machine ForSimulation(int ranks) const;
};

// `text` is untrusted. Errors: unknown keys, with the nearest key; missing keys; figures out of
// range.
absl::StatusOr<Machine> MachineOfJson(std::string_view text, std::string name);
std::string ToJson(const Machine& machine);

}  // namespace ebb::planner

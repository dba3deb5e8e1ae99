// Machines by a name: "8xh100" is a host with eight H100, "16xh100" two of such hosts, and "2xh100" a
// quarter of one, with a quarter of its RAM, cores, network and disks. Each figure of a GPU has its
// source.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "ebb/runtime/planner/machine.h"

namespace ebb::planner {

// "h100|h200|...": the GPUs of "NxNAME", for any number N.
std::string GpuNames();

// `whole_host`: "2xh100" is two GPUs with all the rest of a host. kNotFound names the nearest.
absl::StatusOr<Machine> MachineOfName(std::string_view name, bool whole_host = false);

}  // namespace ebb::planner

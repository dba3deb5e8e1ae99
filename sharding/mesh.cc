#include "ebb/sharding/mesh.h"

namespace ebb {

int Mesh::size(Axes axes) const {
  int ranks = 1;
  for (int a = 0; a < kAxes; ++a)
    if (axes.Has(static_cast<Axis>(a))) ranks *= sizes[a];
  return ranks;
}

int Mesh::index(int rank, Axes axes) const {
  int index = 0, stride = 1;
  for (int a = kAxes; a-- > 0;) {
    const int size = sizes[a], coordinate = rank % size;
    rank /= size;
    if (!axes.Has(static_cast<Axis>(a))) continue;
    index += coordinate * stride;
    stride *= size;
  }
  return index;
}

int Mesh::with(int rank, Axes axes, int index) const {
  int number = 0, stride = 1;
  for (int a = kAxes; a-- > 0;) {
    const int size = sizes[a];
    const bool is_given = axes.Has(static_cast<Axis>(a));
    number += (is_given ? index : rank) % size * stride;
    rank /= size;
    if (is_given) index /= size;
    stride *= size;
  }
  return number;
}

Mesh MeshOf(const Config& config, int ranks) {
  const auto pipeline = static_cast<int>(config.ebb.mesh.pipeline),
             tensor = static_cast<int>(config.ebb.mesh.tensor);
  const int data = config.ebb.mesh.DataRanks(ranks);
  const int shards = config.ebb.shard_group > 0 ? static_cast<int>(config.ebb.shard_group) : data;
  const int inner = config.zero.stage == 3 ? static_cast<int>(config.zero.hpz_partition_size) : 1;
  return {.sizes = {pipeline, data / shards, shards / inner, inner, tensor}};
}

bool Counts(Axes whole, const Mesh& mesh, int rank) {
  return mesh.index(rank, whole) == 0;
}

}  // namespace ebb

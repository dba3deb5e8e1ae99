#include <cmath>
#include <vector>

#include "ebb/optim/norm.h"

int main() {
  ebb::ThreadTeam team(1);
  const std::vector<float> gradient(2000, 1);
  std::vector<double> blocks(ebb::optim::NormBlocks(2000));
  const double sum =
      ebb::optim::SumOfSquares(team, gradient.data(), ebb::DType::kFloat32, 2000, blocks);
  return sum == 2000 ? 0 : 1;
}

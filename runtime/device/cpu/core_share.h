// How many ranks share this machine's cores, as far as the calling thread knows. Only
// Device::Cpu(0) uses it, to give each rank its share of the cores. A program that runs ranks as
// threads sets it around the body of each rank; a process that is one of several ranks sets it
// once.
#pragma once

namespace ebb {

class CoreShare {
 public:
  explicit CoreShare(int ranks);
  ~CoreShare();
  CoreShare(const CoreShare&) = delete;
  CoreShare& operator=(const CoreShare&) = delete;

  // For all threads of this process outside of a CoreShare.
  static void SetForProcess(int ranks);

  // The cores that this process may run on, divided by the ranks that share them; at least 1.
  static int CoresPerRank();
  static int Cores();

 private:
  int outer_;
};

}  // namespace ebb

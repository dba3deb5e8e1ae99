// The objects that most parts of an engine work on. A part takes the core and the parts that it
// names.
#pragma once

namespace ebb {

class EngineCalls;
class EngineCommunicators;
class EngineStreams;
class IssueObservers;
class MemoryLedger;
class RunnablePlans;
class StepErrors;
class Storage;
class StreamOrder;
struct EngineInputs;
struct KernelsByStream;

// Made by Create, once there is memory. The engine owns the objects, which outlive its parts. For
// another plan (Engine::Reorder) `order` is made anew at its address.
struct Core {
  const EngineInputs& inputs;
  RunnablePlans& plans;
  const int slice;  // the number of this rank's slice of every unit
  const KernelsByStream& kernels;
  EngineStreams& streams;
  StreamOrder& order;
  Storage& storage;
  EngineCommunicators& communicators;
  EngineCalls& calls;
  StepErrors& errors;
  const IssueObservers& observers;
  MemoryLedger& ledger;
};

}  // namespace ebb

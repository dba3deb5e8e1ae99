/* Ebb for other languages: the engine behind C functions, opaque handles and plain structs. docs/c.md walks through a trainer.
 *
 *   ebb_world_open           which rank this is
 *   ebb_model_add_...        the model as data: units, parameters, the order of visits
 *   ebb_engine_create        shards, pools, the plan
 *   ebb_step_begin, ebb_scope_open, ebb_scope_close, ebb_step_finish, ebb_step_report
 *
 * What is said in ebb/runtime/engine/engine.h and step.h holds here: calls of one engine are ordered, from whichever thread;
 * every rank makes the same calls in the same order; a collective call is one that all ranks make.
 *
 * Every function that returns int32_t returns 0 or the code of an error (those of absl::StatusCode, EBB_INVALID_ARGUMENT ...);
 * ebb_error() is its text. Functions that return an id return -1 instead. A handle that is null, was destroyed or was
 * never made is such an error, too. No exception leaves a function, and none ends the process.
 *
 * Structs that begin with struct_size take the caller's sizeof there; what lies behind it has its default, so fields are
 * only ever added at the end. In options 0 is the default. Elements of an array have one struct_size. Other structs never change, nor do values of enumerations. A text of 0 is "not given".
 *
 * Callbacks come from threads of the engine, several at once, and must not call the engine. They return 0, or anything else
 * for "failed". */
#ifndef EBB_C_H
#define EBB_C_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define EBB_ABI 1 /* the major number of the library: libebb.so.1 */

enum {
  EBB_OK = 0,
  EBB_CANCELLED = 1,
  EBB_UNKNOWN = 2,
  EBB_INVALID_ARGUMENT = 3,
  EBB_DEADLINE_EXCEEDED = 4,
  EBB_NOT_FOUND = 5,
  EBB_ALREADY_EXISTS = 6,
  EBB_PERMISSION_DENIED = 7,
  EBB_RESOURCE_EXHAUSTED = 8,
  EBB_FAILED_PRECONDITION = 9,
  EBB_ABORTED = 10,
  EBB_OUT_OF_RANGE = 11,
  EBB_UNIMPLEMENTED = 12,
  EBB_INTERNAL = 13,
  EBB_UNAVAILABLE = 14,
  EBB_DATA_LOSS = 15
};
enum { EBB_FP32 = 0, EBB_BF16 = 1, EBB_FP16 = 2, EBB_INT8 = 3 }; /* dtypes; int8: bytes */
enum { EBB_FORWARD = 0, EBB_BACKWARD = 1, EBB_RECOMPUTE = 2 };   /* kinds of scopes */
enum { EBB_DEVICE = 0, EBB_CPU = 1, EBB_NVME = 2 };              /* tiers */
enum { EBB_READ = 0, EBB_WRITE = 1 };                            /* directions */
enum { EBB_LOG_INFO = 0, EBB_LOG_WARNING = 1 };
enum { /* classes of state */
       EBB_PARAMETER = 0,
       EBB_MASTER = 1, /* the fp32 value that is updated; of a frozen parameter its value */
       EBB_GRADIENT = 2,
       EBB_OPTIMIZER = 3,
       EBB_ACTIVATION = 4,
       EBB_GATHER = 5,
       EBB_SECONDARY = 6,
       EBB_STAGING = 7,
       EBB_WORKSPACE = 8,
       EBB_DRIVER = 9,
       EBB_CONTROL = 10
};

typedef struct ebb_world ebb_world;
typedef struct ebb_model ebb_model;
typedef struct ebb_engine ebb_engine;

/* Elements [begin, end) of a parameter, flattened, as fp32. */
typedef int32_t (*ebb_fill)(void* user, int32_t parameter, int64_t begin, int64_t end,
                            float* values);
typedef int32_t (*ebb_sink)(void* user, int32_t parameter, int64_t begin, int64_t end,
                            const float* values);
typedef void (*ebb_log)(void* user, int32_t level, const char* message);

/* ---- the library ---- */

uint32_t ebb_abi(void);        /* EBB_ABI of the library that is loaded */
const char* ebb_version(void); /* "0.1.0" */
const char* ebb_error(void); /* of this thread's last call that failed; valid until its next call */
void ebb_log_to(
    ebb_log,
    void*
        user); /* instead of standard error, one line at a time, from any thread; null: as before */
/* The configuration resolved for `world` ranks, as JSON. Texts are returned so: at most `capacity` bytes with the 0 at
 * their end; `needed`, unless null, says how many there are. A text that does not fit is EBB_OUT_OF_RANGE. */
int32_t ebb_config_resolve(const char* json, int32_t world, char* text, size_t capacity,
                           size_t* needed);

/* ---- the world ---- */

typedef struct {
  uint32_t struct_size;
  double timeout_seconds; /* until all ranks have to be there; 0: 600 */
} ebb_world_options;
typedef struct {
  uint32_t struct_size;
  int32_t rank, size, local_rank, local_size;
} ebb_world_facts;

/* As torchrun, mpirun or srun has started this process; without a launcher one rank. Collective. Options may be null. */
int32_t ebb_world_open(const ebb_world_options*, ebb_world**);
void ebb_world_close(ebb_world*); /* engines of it may live on; null is fine */
int32_t ebb_world_describe(const ebb_world*, ebb_world_facts*);
int32_t ebb_world_fail(
    ebb_world*,
    const char* why); /* this rank cannot go on: every other rank's calls end with that */

/* ---- the model ---- */

typedef struct {
  uint32_t struct_size;
  int32_t trainable;    /* 0: stored once, in its dtype, never updated */
  const char* name;     /* unique; the key in checkpoints */
  const char* group;    /* of "ebb.parameter_groups" */
  const int64_t* shape; /* of `dimensions` numbers; 0 dimensions: a scalar */
  int32_t dimensions;
  int32_t source_dtype;
  /* Initial values, one of three: host memory, row-major, which stays as it is until ebb_engine_create returns; a tensor of
   * that name in a safetensors file, or in a folder of them with an index; a function of (parameter, index) alone. */
  const void* source;
  const char *file, *tensor;
  ebb_fill fill;
  void* user;
  /* The dtype that it is shown in; has_dtype 0: the configuration's. EBB_INT8: bytes that are never cast, of a frozen
   * parameter; as fp32 they are the numbers 0 to 255. */
  int32_t has_dtype, dtype;
} ebb_parameter;
typedef struct {
  uint32_t struct_size;
  int32_t unit;
  int32_t forward, backward,
      gradients; /* which of that there is, as in ebb::Visit; usually 1, 1, 1 */
} ebb_visit;
typedef struct {
  int32_t opens; /* else it closes */
  int32_t kind;
  int32_t visit;
} ebb_event;

ebb_model* ebb_model_create(void);
void ebb_model_destroy(ebb_model*);
int32_t ebb_model_add_unit(ebb_model*, const char* name,
                           int32_t keep_whole); /* its id, 0 for the first one */
int32_t ebb_model_add_parameter(ebb_model*, int32_t unit,
                                const ebb_parameter*);     /* its id, 0 for the first one */
int32_t ebb_model_add_visit(ebb_model*, const ebb_visit*); /* its number */
int32_t ebb_model_set_order(ebb_model*, const ebb_event*,
                            int32_t events); /* ebb::ModelSpec::order */

typedef struct {
  int32_t state, tier;
  uint64_t predicted, current, peak; /* bytes of this rank */
} ebb_memory_row;

/* What a step will do, as a table for people; and what a rank will hold. No engine, no device, no other rank. Rows are
 * returned so: at most `capacity`; `rows` says how many there are. */
int32_t ebb_plan(const ebb_model*, int32_t world, const char* json, char* text, size_t capacity,
                 size_t* needed);
int32_t ebb_predict_memory(const ebb_model*, int32_t world, const char* json, ebb_memory_row*,
                           int32_t capacity, int32_t* rows);

/* ---- the engine ---- */

typedef struct {
  uint32_t struct_size;
  int32_t
      threads; /* of updates and reductions on the CPU; 0: the cores over the ranks of the host */
  const char* device;   /* "cpu" (0), "cuda", "cuda:1" */
  const char* name;     /* in the log and of swap folders; 0: "engine" */
  void* compute_stream; /* on a GPU the caller's cudaStream_t; 0: the engine makes one */
  int32_t initial_values_of_rank_0;
} ebb_engine_options;
typedef struct {
  void* data; /* where every scope of the unit shows it */
  int64_t elements;
  int32_t dtype;
  int32_t gradient_dtype; /* -1: frozen */
} ebb_view;

/* Collective. The model may be changed or destroyed afterwards. Options may be null. */
int32_t ebb_engine_create(ebb_world*, const ebb_model*, const char* json, const ebb_engine_options*,
                          ebb_engine**);
/* Ends its step, its threads and its files. Memory that views show stays until ebb_engine_destroy, for tensors that outlive
 * the engine; all other calls are errors from here on. */
int32_t ebb_engine_close(ebb_engine*);
void ebb_engine_destroy(ebb_engine*);
/* The unit's parameters in the order in which they were added. Addresses hold until ebb_engine_suspend
 * or ebb_engine_reorder. */
int32_t ebb_engine_views(ebb_engine*, int32_t unit, ebb_view*, int32_t capacity, int32_t* count);
/* Collective, between steps: what ebb_model_add_visit and ebb_model_set_order would have said. No events: the visits in turn.
 * Views are to be asked for again. */
int32_t ebb_engine_reorder(ebb_engine*, const ebb_visit*, int32_t visits, const ebb_event*,
                           int32_t events);
int32_t ebb_engine_suspend(
    ebb_engine*,
    int32_t suspended); /* collective: gives the device's memory back; 0: takes it again */
int32_t ebb_engine_copy_parameters(ebb_engine*, ebb_engine* from); /* collective */

/* ---- a step ---- */

typedef struct {
  uint32_t struct_size;
  int32_t has_learning_rate, has_weight_decay; /* 0: the configuration's */
  const char* group;                           /* 0: the parameters of no group */
  double learning_rate, weight_decay;
} ebb_group_options;
typedef struct {
  uint32_t struct_size;
  int32_t micro_batches;   /* 0: gradient_accumulation_steps */
  int32_t hold_updates;    /* no update before the end */
  int32_t may_leave_out;   /* a unit without a backward is no mistake; its gradient is zero */
  int32_t rates_at_finish; /* ebb_step_finish may have options, also where updates are early */
  int32_t group_count;
  const ebb_group_options* groups;
  int32_t has_learning_rate; /* 0: the schedule's */
  double learning_rate;
  double gradient_divisor; /* 0: ranks x micro-batches */
} ebb_step_options;
typedef struct {
  uint32_t struct_size;
  int32_t group_count;
  const ebb_group_options* groups;
  double gradient_scale; /* 0: 1 */
} ebb_finish_options;
typedef struct {
  void* data; /* null: frozen */
  int64_t elements;
  int32_t dtype;
  int32_t first; /* contents undefined: write. Else add */
} ebb_gradient;
typedef struct {
  uint32_t struct_size;
  int32_t applied;
  int64_t step, skipped_steps;
  double loss, gradient_norm, loss_scale, learning_rate;
} ebb_report;

int32_t ebb_step_begin(ebb_engine*, const ebb_step_options*); /* options may be null */
/* Of the evaluation that is open, else of the step. Opening waits until the unit's parameters are where its views say. What is wrong
 * with a scope is the error of ebb_step_finish. */
int32_t ebb_scope_open(ebb_engine*, int32_t kind, int32_t unit, int64_t* scope);
int32_t ebb_scope_close(ebb_engine*, int64_t scope);
/* Of a backward scope: gradients of `count` parameters of its unit. */
int32_t ebb_scope_gradients(ebb_engine*, int64_t scope, const int32_t* parameters, int32_t count,
                            ebb_gradient*);
/* An fp32 scalar on the device, unscaled. The report has the mean over micro-batches and ranks. Of an evaluation that is
 * open it is that one's. */
int32_t ebb_add_loss(ebb_engine*, const void* device_scalar);
int32_t ebb_step_loss_scale(ebb_engine*, float* host,
                            const void** device); /* either may be null; `host` waits with fp16 */
int32_t ebb_step_reduce(ebb_engine*); /* with hold_updates: gradients are final and can be read */
int32_t ebb_step_finish(ebb_engine*, const ebb_finish_options*); /* options may be null */
int32_t ebb_step_drop(
    ebb_engine*); /* the step that is open, with its gradients; none open: nothing */
int32_t ebb_step_report(ebb_engine*,
                        ebb_report*); /* the verdict on the last finished step; waits for it */
int32_t ebb_evaluation_begin(ebb_engine*);
int32_t ebb_evaluation_finish(ebb_engine*, double* loss); /* collective; `loss` may be null */

/* ---- state ---- */

/* This rank's slices, on the calling thread. `state`: EBB_PARAMETER, EBB_MASTER, EBB_GRADIENT, or EBB_OPTIMIZER with the
 * state's name ("exp_avg"). Every rank writes the same things. */
int32_t ebb_read(ebb_engine*, int32_t state, const char* name, ebb_sink, void* user);
int32_t ebb_write(ebb_engine*, int32_t state, const char* name, ebb_fill, void* user);
/* Collective: a parameter whole, in order, on rank `root`, or with -1 on all. `state`: EBB_MASTER or EBB_PARAMETER. */
int32_t ebb_gather(ebb_engine*, int32_t parameter, int32_t state, int32_t root, ebb_sink,
                   void* user);

typedef struct {
  uint32_t struct_size;
  int32_t keep;        /* the newest so many stay in the folder; 0: all */
  const void* trainer; /* the caller's own bytes; rank 0's count */
  int64_t trainer_bytes;
  const void* of_this_rank; /* likewise, each rank's own */
  int64_t of_this_rank_bytes;
} ebb_save_options;
typedef struct {
  uint32_t struct_size;
  int32_t ranks; /* of the run that saved */
  int64_t step;
  const void* trainer; /* valid until the engine's next ebb_load */
  int64_t trainer_bytes;
  const void* of_this_rank; /* none where the world is another */
  int64_t of_this_rank_bytes;
} ebb_loaded;

/* Collective. `ticket` null: returns when the checkpoint is on the disk; else when it is on its way, beside the steps that come. */
int32_t ebb_save(ebb_engine*, const char* folder, const ebb_save_options*, int64_t* ticket);
/* `done` null: waits; else only says whether the save has ended. With parameters on NVMe a save may
   begin in the next step. Until it has begun, waiting on another thread than the one that called
   ebb_save is EBB_FAILED_PRECONDITION, because the two threads could wait for each other. */
int32_t ebb_save_wait(ebb_engine*, int64_t ticket, int32_t* done);
int32_t ebb_load(ebb_engine*, const char* path,
                 ebb_loaded*); /* the newest whole one; `loaded` may be null */

typedef struct {
  int32_t state, tier, direction;
  uint64_t predicted, bytes; /* of the last finished step */
} ebb_traffic_row;
typedef struct {
  char operation[24]; /* "gather", "reduce" ... */
  uint64_t predicted, bytes;
} ebb_communication_row;

int32_t ebb_memory(ebb_engine*, ebb_memory_row*, int32_t capacity, int32_t* rows);
int32_t ebb_traffic(ebb_engine*, ebb_traffic_row*, int32_t capacity, int32_t* rows);
int32_t ebb_communication(ebb_engine*, ebb_communication_row*, int32_t capacity, int32_t* rows);

#ifdef __cplusplus
}
#endif
#endif

// Threads take loop indices one by one, so a thread that the system has put aside delays nobody. After a loop a thread
// spins for a short while (the next product of a decode step comes within microseconds), then sleeps.
#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>

namespace jaxlm {
namespace {

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int64_t environment(const char* name, int64_t fallback) {
  const char* text = std::getenv(name);
  const int64_t value = text ? std::atoll(text) : 0;
  return value > 0 ? value : fallback;
}

int64_t available_cores() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

// One word holds loop number (32 bits), count (16) and next index (16): taking an index is one compare-and-swap that
// fails if the loop has changed, so what was read of body and context before it is valid after it.
struct Pool {
  std::atomic<uint64_t> ticket{0};
  std::atomic<void (*)(void*, int64_t)> body{nullptr};
  std::atomic<void*> context{nullptr};
  std::atomic<int64_t> done{0};
  std::atomic<int> sleeping{0};
  std::mutex busy, sleep;
  std::condition_variable wake;
  const int threads = static_cast<int>(std::min(available_cores(), environment("JAXLM_CPU_THREADS", 1 << 10)));
  const std::chrono::microseconds spin{environment("JAXLM_CPU_SPIN_US", 100)};

  Pool() {
    for (int i = 1; i < threads; ++i) std::thread([this] { work(); }).detach();
  }

  static bool has_work(uint64_t t) { return (t & 0xffff) < (t >> 16 & 0xffff); }

  void drain() {
    for (uint64_t t = ticket.load(); has_work(t);) {
      auto call = body.load(std::memory_order_relaxed);
      void* data = context.load(std::memory_order_relaxed);
      if (!ticket.compare_exchange_weak(t, t + 1)) continue;
      call(data, t & 0xffff);
      done.fetch_add(1, std::memory_order_release);
      t = ticket.load();
    }
  }

  void work() {
    for (;;) {
      drain();
      const auto until = std::chrono::steady_clock::now() + spin;
      while (!has_work(ticket.load(std::memory_order_relaxed))) {
        for (int i = 0; i < 64 && !has_work(ticket.load(std::memory_order_relaxed)); ++i) pause();
        if (std::chrono::steady_clock::now() < until) continue;
        std::unique_lock<std::mutex> lock(sleep);
        sleeping.fetch_add(1);
        wake.wait(lock, [this] { return has_work(ticket.load()); });
        sleeping.fetch_sub(1);
      }
    }
  }

  void run(int64_t count, void (*call)(void*, int64_t), void* data) {
    body.store(call, std::memory_order_relaxed);
    context.store(data, std::memory_order_relaxed);
    done.store(0, std::memory_order_relaxed);
    ticket.store(((ticket.load() >> 32) + 1) << 32 | static_cast<uint64_t>(count) << 16);
    if (sleeping.load() > 0) {
      { std::lock_guard<std::mutex> lock(sleep); }
      wake.notify_all();
    }
    drain();
    for (int i = 0; done.load(std::memory_order_acquire) < count; ++i) {
      pause();
      if (i % 1024 == 1023) std::this_thread::yield();
    }
  }
};

std::atomic<Pool*> current{nullptr};
std::mutex creating;

// Threads do not survive a fork: the child forgets the pool (and leaks it) and makes its own when it needs one.
void forget_pool() {
  current.store(nullptr);
  new (&creating) std::mutex;
}

Pool& pool() {
  if (Pool* p = current.load()) return *p;
  std::lock_guard<std::mutex> lock(creating);
  static const int hook = pthread_atfork(nullptr, nullptr, forget_pool);
  (void)hook;
  if (!current.load()) current.store(new Pool);
  return *current.load();
}

}  // namespace

int thread_count() { return pool().threads; }

void parallel_for(int64_t count, void (*body)(void*, int64_t), void* context) {
  Pool& p = pool();
  if (count > 1 && count <= 0xffff && p.threads > 1 && p.busy.try_lock()) {
    p.run(count, body, context);
    p.busy.unlock();
    return;
  }
  for (int64_t i = 0; i < count; ++i) body(context, i);
}

}  // namespace jaxlm

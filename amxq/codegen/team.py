"""How the threads of a launch share the programs of its grid, as LLVM IR.

A team lies on the stack of whoever launches. Each thread has a cursor there, a cache line pair of
its own: which programs of its contiguous share nobody has taken yet. A thread takes an eighth of
what is left of its own share, from the front, so that it streams its own memory in order. When
nothing is left it takes half of what is left of another's share, from the back. So no thread waits
for a slower one (its core may be shared, or a small one) longer than that one's last piece takes,
and a team that turns out smaller than asked for, as inside of an OpenMP region, does all the work.

    team:    data, threads, programs a unit, units' shift, programs; then a cursor each
    cursor:  first unit | end << 32

A unit is one program, or more where a grid has 2³¹ programs and more.
"""

from __future__ import annotations

SLOTS = 5
"""8-byte slots of the caller's data before the arguments: the grid's three sizes, the addresses of
omp_get_thread_num and of GOMP_parallel."""

TEAM = """\
define void @{name}_launch(ptr %data, i64 %threads) {{
entry:
  %cursors = add i64 %threads, 1
  %bytes = mul i64 %cursors, 128
  %team = alloca i8, i64 %bytes, align 128
  %g0 = load i64, ptr %data
  %p1 = getelementptr i64, ptr %data, i64 1
  %g1 = load i64, ptr %p1
  %p2 = getelementptr i64, ptr %data, i64 2
  %g2 = load i64, ptr %p2
  %g01 = mul i64 %g0, %g1
  %total = mul i64 %g01, %g2
  %large = lshr i64 %total, 31
  %unit = add i64 %large, 1
  %up = add i64 %total, %large
  %units = udiv i64 %up, %unit
  %alone = icmp eq i64 %threads, 1
  %shift = select i1 %alone, i64 0, i64 3
  %team1 = getelementptr i64, ptr %team, i64 1
  %team2 = getelementptr i64, ptr %team, i64 2
  %team3 = getelementptr i64, ptr %team, i64 3
  %team4 = getelementptr i64, ptr %team, i64 4
  store ptr %data, ptr %team
  store i64 %threads, ptr %team1
  store i64 %unit, ptr %team2
  store i64 %shift, ptr %team3
  store i64 %total, ptr %team4
  br label %share
share:
  %t = phi i64 [ 0, %entry ], [ %t.next, %share ]
  %t.next = add i64 %t, 1
  %a = mul i64 %units, %t
  %lo = udiv i64 %a, %threads
  %b = mul i64 %units, %t.next
  %hi = udiv i64 %b, %threads
  %high = shl i64 %hi, 32
  %mine = or i64 %lo, %high
  %cursor = call ptr @cursor(ptr %team, i64 %t)
  store i64 %mine, ptr %cursor
  %more = icmp ult i64 %t.next, %threads
  br i1 %more, label %share, label %run
run:
  br i1 %alone, label %serial, label %parallel
serial:
  call void @range(ptr %team, i64 0)
  ret void
parallel:
  %p4 = getelementptr i64, ptr %data, i64 4
  %gomp = load ptr, ptr %p4
  %n = trunc i64 %threads to i32
  call void %gomp(ptr @member, ptr %team, i32 %n, i32 0)
  ret void
}}

define internal void @member(ptr %team) {{
  %data = load ptr, ptr %team
  %p3 = getelementptr i64, ptr %data, i64 3
  %number = load ptr, ptr %p3
  %t = call i32 %number()
  %thread = zext i32 %t to i64
  call void @range(ptr %team, i64 %thread)
  ret void
}}

define internal ptr @cursor(ptr %team, i64 %thread) alwaysinline {{
  %line = add i64 %thread, 1
  %at = mul i64 %line, 128
  %cursor = getelementptr i8, ptr %team, i64 %at
  ret ptr %cursor
}}

define internal i64 @take(ptr %team, i64 %thread) alwaysinline {{
entry:
  %team1 = getelementptr i64, ptr %team, i64 1
  %threads = load i64, ptr %team1
  %team3 = getelementptr i64, ptr %team, i64 3
  %shift = load i64, ptr %team3
  %own = call ptr @cursor(ptr %team, i64 %thread)
  br label %look
look:
  %v = load atomic i64, ptr %own acquire, align 8
  %lo = and i64 %v, 4294967295
  %hi = lshr i64 %v, 32
  %left = sub i64 %hi, %lo
  %none = icmp eq i64 %left, 0
  br i1 %none, label %others, label %own.some
own.some:
  %part = lshr i64 %left, %shift
  %tiny = icmp eq i64 %part, 0
  %size = select i1 %tiny, i64 1, i64 %part
  %taken = add i64 %v, %size
  %swap = cmpxchg ptr %own, i64 %v, i64 %taken acq_rel acquire
  %done = extractvalue {{ i64, i1 }} %swap, 1
  br i1 %done, label %found, label %look
found:
  %end = add i64 %lo, %size
  %end.high = shl i64 %end, 32
  %result = or i64 %lo, %end.high
  ret i64 %result
others:
  %i = phi i64 [ 1, %look ], [ %i.next, %other.none ]
  %some = icmp ult i64 %i, %threads
  br i1 %some, label %other, label %nothing
other:
  %j = add i64 %thread, %i
  %wrap = icmp uge i64 %j, %threads
  %j.less = sub i64 %j, %threads
  %victim = select i1 %wrap, i64 %j.less, i64 %j
  %cursor = call ptr @cursor(ptr %team, i64 %victim)
  br label %other.look
other.look:
  %w = load atomic i64, ptr %cursor acquire, align 8
  %w.lo = and i64 %w, 4294967295
  %w.hi = lshr i64 %w, 32
  %w.left = sub i64 %w.hi, %w.lo
  %w.none = icmp eq i64 %w.left, 0
  br i1 %w.none, label %other.none, label %other.some
other.none:
  %i.next = add i64 %i, 1
  br label %others
other.some:
  %half = lshr i64 %w.left, 1
  %middle = add i64 %w.lo, %half
  %middle.high = shl i64 %middle, 32
  %kept = or i64 %w.lo, %middle.high
  %w.swap = cmpxchg ptr %cursor, i64 %w, i64 %kept acq_rel acquire
  %w.done = extractvalue {{ i64, i1 }} %w.swap, 1
  br i1 %w.done, label %stolen, label %other.look
stolen:
  %w.high = shl i64 %w.hi, 32
  %mine = or i64 %middle, %w.high
  store atomic i64 %mine, ptr %own release, align 8
  br label %look
nothing:
  ret i64 0
}}
"""

package pgproxy

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/holdsend/holdsend-go/internal/pgtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var modes = []string{"cache_statement", "cache_describe", "describe_exec", "exec", "simple_protocol"}

// inEachMode runs a test in every pgx query mode: first with nothing prepared, then with all statements prepared before.
func inEachMode(t *testing.T, test func(t *testing.T, s *setup)) {
	for _, mode := range modes {
		for _, warm := range []bool{false, true} {
			name := mode
			if warm {
				name += " again"
			}
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				s := open(t, mode)
				if warm {
					conn := s.connect(t)
					s.begin(t, conn)
					require.NoError(t, s.commit(t.Context(), conn))
					s.conn = conn
				}
				test(t, s)
			})
		}
	}
}

type setup struct {
	mode   string
	proxy  *Proxy
	direct *pgxpool.Pool // past the proxy
	conn   *pgx.Conn     // through the proxy
}

func open(t *testing.T, mode string) *setup {
	connectionURL := pgtest.URL(t)
	s := &setup{mode: mode, proxy: Start(t, connectionURL), direct: pgtest.Pool(t, connectionURL, nil)}
	pgtest.Exec(t, s.direct, "create table note (id int primary key, done bool); insert into note values (1, false)")
	s.conn = s.connect(t)
	return s
}

func (s *setup) connect(t *testing.T) *pgx.Conn {
	conn, err := pgx.Connect(t.Context(), pgtest.With(t, s.proxy.URL(), "default_query_exec_mode", s.mode))
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close(context.Background()) })
	return conn
}

// begin does what comes before the last batch of an attempt: a batch that commits and begins anew.
func (s *setup) begin(t *testing.T, conn *pgx.Conn) {
	var batch pgx.Batch
	batch.Queue("begin")
	batch.Queue("update note set done = $1", false)
	batch.Queue("commit")
	batch.Queue("begin")
	batch.Queue("select done from note where id = $1 for no key update", 1)
	require.NoError(t, conn.SendBatch(t.Context(), &batch).Close())
}

// commit sends a guarded update and COMMIT in one batch.
func (s *setup) commit(ctx context.Context, conn *pgx.Conn) error {
	var batch pgx.Batch
	batch.Queue("update note set done = $2 where id = $1", 1, true)
	batch.Queue("commit")
	return conn.SendBatch(ctx, &batch).Close()
}

func (s *setup) isDone(t *testing.T) bool {
	return pgtest.Value[bool](t, s.direct, "select done from note")
}

// waitUnlocked waits until nobody holds the note's lock any more.
func (s *setup) waitUnlocked(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
	defer cancel()
	_, err := s.direct.Exec(ctx, "select from note for update")
	require.NoError(t, err, "the transaction is still open")
}

func (s *setup) isLocked(t *testing.T) bool {
	tag := pgtest.Exec(t, s.direct, "select from note for update skip locked")
	return tag.RowsAffected() == 0
}

func TestItRelaysAndRecords(t *testing.T) {
	t.Parallel()
	inEachMode(t, func(t *testing.T, s *setup) {
		s.proxy.Reset()
		s.begin(t, s.conn)
		require.NoError(t, s.commit(t.Context(), s.conn))
		assert.True(t, s.isDone(t))

		batches := s.proxy.Batches()
		last, first := batches[len(batches)-1], batches[0]
		for _, b := range batches {
			if b.Contains("for no key update") {
				first = b
			}
		}
		assert.True(t, last.EndsInCommit(), "%q", last)
		assert.True(t, last.Contains("UPDATE NOTE SET DONE"), "%q", last)
		assert.False(t, first.EndsInCommit(), "%q", first)
		if s.mode == "simple_protocol" {
			assert.Equal(t, "Q", last.Messages)
			assert.Len(t, last.SQL, 1)
		} else {
			assert.Equal(t, []string{"update note set done = $2 where id = $1", "commit"}, last.SQL)
			assert.Equal(t, []string{
				"begin", "update note set done = $1", "commit", "begin", "select done from note where id = $1 for no key update",
			}, first.SQL)
		}
	})
}

func TestItCountsRoundTrips(t *testing.T) {
	t.Parallel()
	s := open(t, "exec")
	assert.Equal(t, 0, s.proxy.RoundTrips(), "connecting counts")
	s.begin(t, s.conn)
	assert.Equal(t, 1, s.proxy.RoundTrips(), "a batch is one")
	require.NoError(t, s.commit(t.Context(), s.conn))
	pgtest.Exec(t, s.conn, "select 1; select 2; select 3")
	assert.Equal(t, 3, s.proxy.RoundTrips())

	s.proxy.Reset()
	_, err := s.conn.Prepare(t.Context(), "named", "select 4")
	require.NoError(t, err)
	pgtest.Exec(t, s.conn, "named")
	assert.Equal(t, 2, s.proxy.RoundTrips(), "prepare and execute are two")
	batches := s.proxy.Batches()
	require.Len(t, batches, 2)
	assert.Empty(t, batches[0].SQL, "preparing executes nothing")
	assert.Equal(t, []string{"select 4"}, batches[1].SQL)

	// Several batches sent at once are one, and a Flush is one of its own if its answer is waited for.
	s.proxy.Reset()
	pipeline := s.conn.PgConn().StartPipeline(t.Context())
	pipeline.SendQueryParams("select 5", nil, nil, nil, nil)
	pipeline.SendPipelineSync()
	pipeline.SendQueryParams("select 6", nil, nil, nil, nil)
	require.NoError(t, pipeline.Sync()) // sends both
	require.NoError(t, pipeline.Close())
	assert.Equal(t, 1, s.proxy.RoundTrips())
	assert.Len(t, s.proxy.Batches(), 2)

	s.proxy.Reset()
	pipeline = s.conn.PgConn().StartPipeline(t.Context())
	pipeline.SendPrepare("other", "select 7", nil)
	pipeline.SendFlushRequest()
	require.NoError(t, pipeline.Flush())
	_, err = pipeline.GetResults()
	require.NoError(t, err)
	pipeline.SendQueryPrepared("other", nil, nil, nil)
	require.NoError(t, pipeline.Sync())
	require.NoError(t, pipeline.Close())
	assert.Equal(t, 2, s.proxy.RoundTrips())
}

func TestCutBeforeBatch(t *testing.T) {
	t.Parallel()
	inEachMode(t, func(t *testing.T, s *setup) {
		s.begin(t, s.conn)
		injected := s.proxy.Inject(Fault{Do: CutBeforeBatch})
		require.Error(t, s.commit(t.Context(), s.conn))
		injected.Wait(t)
		s.waitUnlocked(t)
		assert.False(t, s.isDone(t))
	})
}

func TestCutBeforeCommit(t *testing.T) {
	t.Parallel()
	inEachMode(t, func(t *testing.T, s *setup) {
		pgtest.Exec(t, s.direct, "create sequence updated; create function count_it() returns trigger language plpgsql as $$ begin "+
			"perform nextval('updated'); return new; end $$; create trigger count_it before update on note for each row "+
			"when (new.done) execute function count_it()")
		s.begin(t, s.conn)
		injected := s.proxy.Inject(Fault{Do: CutBeforeCommit})
		require.Error(t, s.commit(t.Context(), s.conn))
		injected.Wait(t)
		s.waitUnlocked(t)
		assert.False(t, s.isDone(t), "it was committed")
		// A sequence keeps what a rollback takes back.
		assert.Equal(t, s.mode != "simple_protocol", pgtest.Value[bool](t, s.direct, "select is_called from updated"),
			"what precedes COMMIT must reach the server, except where it is in the same message")
	})
}

func TestHoldCommit(t *testing.T) {
	t.Parallel()
	inEachMode(t, func(t *testing.T, s *setup) {
		s.begin(t, s.conn)
		injected := s.proxy.Inject(Fault{Do: HoldCommit})
		require.Error(t, s.commit(t.Context(), s.conn), "the client is not cut")
		injected.Wait(t)
		assert.True(t, s.isLocked(t), "the transaction is not open while its COMMIT is under way")
		assert.False(t, s.isDone(t))
		injected.Release()
		injected.WaitExecuted(t)
		assert.True(t, s.isDone(t), "COMMIT was not delivered")
	})
}

func TestHoldCommitInSilence(t *testing.T) {
	t.Parallel()
	inEachMode(t, func(t *testing.T, s *setup) {
		s.begin(t, s.conn)
		injected := s.proxy.Inject(Fault{Do: HoldCommit, Silent: true})
		answer := make(chan error, 1)
		go func() { answer <- s.commit(t.Context(), s.conn) }()
		injected.Wait(t)
		assert.True(t, s.isLocked(t))
		assert.Empty(t, answer, "the client was answered")
		injected.Release()
		require.NoError(t, <-answer, "the answer does not come after Release")
		assert.True(t, s.isDone(t))
		pgtest.Exec(t, s.conn, "select 1") // the connection is as good as before
	})
}

func TestHoldCommitOfAClientThatGivesUp(t *testing.T) {
	t.Parallel()
	inEachMode(t, func(t *testing.T, s *setup) {
		s.begin(t, s.conn)
		injected := s.proxy.Inject(Fault{Do: HoldCommit, Silent: true})
		ctx, cancel := context.WithCancel(t.Context())
		answer := make(chan error, 1)
		go func() { answer <- s.commit(ctx, s.conn) }()
		injected.Wait(t)
		cancel()
		require.ErrorIs(t, <-answer, context.Canceled)
		<-s.conn.PgConn().CleanupDone()
		assert.True(t, s.isLocked(t))
		injected.Release()
		injected.WaitExecuted(t)
		assert.True(t, s.isDone(t), "COMMIT was not delivered")
	})
}

func TestLoseAnswers(t *testing.T) {
	t.Parallel()
	for _, do := range []Action{LoseCommitAnswer, LoseAnswers} {
		t.Run(map[Action]string{LoseCommitAnswer: "of commit", LoseAnswers: "of all"}[do], func(t *testing.T) {
			t.Parallel()
			inEachMode(t, func(t *testing.T, s *setup) {
				s.begin(t, s.conn)
				injected := s.proxy.Inject(Fault{Do: do})
				var batch pgx.Batch
				batch.Queue("update note set done = $2 where id = $1", 1, true)
				batch.Queue("commit")
				results := s.conn.SendBatch(t.Context(), &batch)
				tag, err := results.Exec()
				if do == LoseCommitAnswer {
					// The connection may break so fast that the client's kernel drops what came before.
					if err == nil {
						assert.Equal(t, "UPDATE 1", tag.String())
					}
				} else {
					require.Error(t, err, "the answer came through")
				}
				_, err = results.Exec()
				require.Error(t, err, "the answer to COMMIT came through")
				require.Error(t, results.Close())
				injected.Wait(t)
				injected.WaitExecuted(t)
				assert.True(t, s.isDone(t), "COMMIT was not executed")
				require.Error(t, s.conn.Ping(t.Context()), "the client is not cut")
			})
		})
	}
}

func TestWhatPrecedesALostCommitAnswerComesThrough(t *testing.T) {
	t.Parallel()
	inEachMode(t, func(t *testing.T, s *setup) {
		s.begin(t, s.conn)
		s.proxy.Inject(Fault{Do: LoseCommitAnswer, Silent: true})
		ctx, cancel := context.WithCancel(t.Context())
		var batch pgx.Batch
		batch.Queue("update note set done = $2 where id = $1", 1, true)
		batch.Queue("commit")
		results := s.conn.SendBatch(ctx, &batch)
		tag, err := results.Exec()
		require.NoError(t, err)
		assert.Equal(t, "UPDATE 1", tag.String())
		cancel()
		require.Error(t, results.Close())
		<-s.conn.PgConn().CleanupDone()
	})
}

func TestLoseTheAnswerOfACommitThatFails(t *testing.T) {
	t.Parallel()
	inEachMode(t, func(t *testing.T, s *setup) {
		pgtest.Exec(t, s.direct, "create function refuse() returns trigger language plpgsql as $$ begin raise 'refused'; end $$; "+
			"create constraint trigger refuse after update on note deferrable initially deferred for each row "+
			"when (new.done) execute function refuse()")
		s.begin(t, s.conn)
		injected := s.proxy.Inject(Fault{Do: LoseCommitAnswer})
		err := s.commit(t.Context(), s.conn)
		require.Error(t, err)
		assert.NotContains(t, err.Error(), "refused", "the error came through")
		injected.WaitExecuted(t)
		s.waitUnlocked(t)
		assert.False(t, s.isDone(t))
	})
}

// The server may be gone before it has answered: then there is no answer to lose, and whoever waits for that must hear it.
func TestAnAnswerThatNeverComesIsNotLost(t *testing.T) {
	t.Parallel()
	for _, do := range []Action{LoseCommitAnswer, LoseAnswers} {
		for cause, end := range map[string]func(s *setup, pid uint32){
			"the server's process is ended": func(s *setup, pid uint32) {
				pgtest.Exec(t, s.direct, "select pg_terminate_backend($1::int)", pid)
			},
			"everything is cut": func(s *setup, _ uint32) { s.proxy.Cut() },
		} {
			s := open(t, "exec")
			pid := s.conn.PgConn().PID()
			lock, err := s.direct.Begin(t.Context())
			require.NoError(t, err)
			pgtest.Exec(t, lock, "select from note for update")
			injected := s.proxy.Inject(Fault{Do: do})
			answer := make(chan error, 1)
			go func() { answer <- s.commit(t.Context(), s.conn) }()
			require.Eventually(t, func() bool {
				return pgtest.Value[bool](t, s.direct, "select exists (select from pg_locks where pid = $1 and not granted)", pid)
			}, waitTimeout, time.Millisecond)
			assert.False(t, injected.Withdraw(s.proxy))
			end(s, pid)
			require.Error(t, <-answer)
			select {
			case <-injected.Ended():
			case <-time.After(waitTimeout):
				t.Fatalf("%s: the fault does not end", cause)
			}
			assert.False(t, injected.Happened(), cause)
			require.NoError(t, lock.Rollback(t.Context()))
		}
	}
}

func TestSilence(t *testing.T) {
	t.Parallel()
	for _, do := range []Action{CutBeforeBatch, CutBeforeCommit, LoseCommitAnswer, LoseAnswers} {
		s := open(t, "exec")
		s.begin(t, s.conn)
		injected := s.proxy.Inject(Fault{Do: do, Silent: true})
		ctx, cancel := context.WithCancel(t.Context())
		answer := make(chan error, 1)
		go func() { answer <- s.commit(ctx, s.conn) }()
		injected.Wait(t)
		s.waitUnlocked(t)
		assert.Equal(t, do >= LoseCommitAnswer, s.isDone(t))
		assert.Empty(t, answer, "the client is not left waiting")
		cancel()
		require.ErrorIs(t, <-answer, context.Canceled)
		<-s.conn.PgConn().CleanupDone()
	}
}

func TestWhenChoosesTheBatch(t *testing.T) {
	t.Parallel()
	s := open(t, "exec")
	never := s.proxy.Inject(Fault{Do: CutBeforeBatch, When: func(b Batch) bool { return b.Contains("no such text") }})
	second := s.proxy.Inject(Fault{Do: CutBeforeBatch, When: Nth(2, Batch.EndsInCommit)})
	third := s.proxy.Inject(Fault{Do: CutBeforeBatch, When: func(b Batch) bool { return b.Connection == 2 }})
	s.begin(t, s.conn)
	require.NoError(t, s.commit(t.Context(), s.conn))
	s.begin(t, s.conn)
	require.Error(t, s.commit(t.Context(), s.conn))
	assert.True(t, second.Happened())
	assert.False(t, third.Happened())
	require.Error(t, s.connect(t).Ping(t.Context()))
	assert.True(t, third.Happened())
	require.NoError(t, s.connect(t).Ping(t.Context()), "a fault happens once")
	assert.False(t, never.Happened())
	assert.Equal(t, 3, s.proxy.Connections())
}

func TestEndsInCommit(t *testing.T) {
	t.Parallel()
	for sql, want := range map[string]bool{
		"commit": true, "COMMIT;": true, "select 1;commit": true, "select 1;\n commit ;\n": true, "insert into t values (1); Commit": true,
		"": false, "rollback": false, "commit; select 1": false, "select precommit": false, "commit;begin": false,
	} {
		assert.Equal(t, want, Batch{SQL: []string{sql}}.EndsInCommit(), "%q", sql)
	}
	assert.False(t, Batch{}.EndsInCommit())
	assert.False(t, Batch{SQL: []string{"commit", "begin"}}.EndsInCommit())
}

func TestCutAndRefuse(t *testing.T) {
	t.Parallel()
	s := open(t, "exec")
	s.begin(t, s.conn)
	s.proxy.Refuse(true)
	require.NoError(t, s.conn.Ping(t.Context()), "an open connection is cut")
	s.proxy.Cut()
	require.Error(t, s.conn.Ping(t.Context()))
	s.waitUnlocked(t)
	_, err := pgx.Connect(t.Context(), s.proxy.URL())
	require.Error(t, err)
	s.proxy.Refuse(false)
	require.NoError(t, s.connect(t).Ping(t.Context()))
}

func TestCancelRequestsPass(t *testing.T) {
	t.Parallel()
	s := open(t, "exec")
	ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
	defer cancel()
	go func() {
		// It may come before the query, so it is sent until the query has ended.
		for ctx.Err() == nil {
			_ = s.conn.PgConn().CancelRequest(ctx)
		}
	}()
	_, err := s.conn.Exec(ctx, "select pg_sleep(3600)")
	require.ErrorContains(t, err, "57014")
}

func TestTLSIsRefusedAndThenDoneWithout(t *testing.T) {
	t.Parallel()
	s := open(t, "exec")
	conn, err := pgx.Connect(t.Context(), pgtest.With(t, s.proxy.URL(), "sslmode", "prefer"))
	require.NoError(t, err)
	require.NoError(t, conn.Close(t.Context()))
}

func TestCopy(t *testing.T) {
	t.Parallel()
	s := open(t, "exec")
	rows := make([][]any, 10_000)
	for n := range rows {
		rows[n] = []any{n + 2, true}
	}
	copied, err := s.conn.CopyFrom(t.Context(), pgx.Identifier{"note"}, []string{"id", "done"}, pgx.CopyFromRows(rows))
	require.NoError(t, err)
	assert.EqualValues(t, len(rows), copied)
	assert.Equal(t, len(rows)+1, pgtest.Value[int](t, s.conn, "select count(*) from note"))
}

func TestThroughPgBouncer(t *testing.T) {
	t.Parallel()
	proxy := Start(t, pgtest.PgBouncer(t, pgtest.URL(t), nil))
	conn, err := pgx.Connect(t.Context(), pgtest.With(t, proxy.URL(), "default_query_exec_mode", "exec"))
	require.NoError(t, err)
	assert.Equal(t, 1, pgtest.Value[int](t, conn, "select 1"))
	require.NoError(t, conn.Close(t.Context()))
}

func TestNothingHoldsUpTheEnd(t *testing.T) {
	t.Parallel()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		t.Run("inner", func(t *testing.T) {
			s := open(t, "exec")
			// A client that says nothing, and a COMMIT that is never released.
			silent, err := net.Dial("tcp", s.proxy.listener.Addr().String())
			require.NoError(t, err)
			defer silent.Close()
			s.begin(t, s.conn)
			injected := s.proxy.Inject(Fault{Do: HoldCommit})
			require.Error(t, s.commit(t.Context(), s.conn))
			injected.Wait(t)
		})
	}()
	select {
	case <-ended:
	case <-time.After(waitTimeout):
		t.Fatal("the proxy cannot be closed")
	}
}

func TestItPauses(t *testing.T) {
	t.Parallel()
	s := open(t, "exec")
	const pause = 200 * time.Millisecond
	start := time.Now()
	s.proxy.Pause(pause)
	pgtest.Exec(t, s.conn, "select 1")
	assert.GreaterOrEqual(t, time.Since(start), pause)
}

func TestItKnowsConnectionsByTheirBackend(t *testing.T) {
	t.Parallel()
	s := open(t, "exec")
	other := s.connect(t)
	pid := other.PgConn().PID()

	cut := s.proxy.Inject(Fault{When: func(b Batch) bool { return b.Backend == pid }, Do: CutBeforeBatch})
	pgtest.Exec(t, s.conn, "select 1")
	assert.False(t, cut.Happened(), "another connection's batch was hit")
	assert.True(t, cut.Withdraw(s.proxy))
	assert.False(t, cut.Withdraw(s.proxy), "it was taken back before")
	pgtest.Exec(t, other, "select 1")
	assert.False(t, cut.Happened(), "it was taken back and happened all the same")

	assert.True(t, s.proxy.CutBackend(pid))
	require.Error(t, other.Ping(t.Context()), "the connection was to be cut")
	require.NoError(t, s.conn.Ping(t.Context()), "another connection was cut")
	assert.False(t, s.proxy.CutBackend(0))
}

package postgressql

import (
	"context"
	"time"

	"github.com/holdsend/holdsend-go/internal/rest"
)

// A Batch runs PurgeRecords or PurgeClaims once. It returns what the statement does, and how long it took with a connection.
type Batch func(sql string, args ...any) (count int64, last *time.Time, took time.Duration, err error)

// Purge runs one batch after the other, and rests in between. sqlState returns the SQLSTATE of an error of batch's.
func (s *Statements) Purge(ctx context.Context, staleClaim time.Duration, batch Batch, sqlState func(error) string) (records, claims int64, err error) {
	records, err = purge(ctx, sqlState, func(from time.Time) (int64, *time.Time, time.Duration, error) {
		return batch(s.PurgeRecords, from)
	})
	if err != nil {
		return records, 0, err
	}
	claims, err = purge(ctx, sqlState, func(from time.Time) (int64, *time.Time, time.Duration, error) {
		return batch(s.PurgeClaims, from, staleClaim.Microseconds())
	})
	return records, claims, err
}

func purge(ctx context.Context, sqlState func(error) string, batch func(from time.Time) (int64, *time.Time, time.Duration, error)) (purged int64, err error) {
	races := 0
	for from := new(time.Time); ; {
		count, last, took, err := batch(*from)
		if sqlState(err) == LockNotAvailable && races < MostRaces {
			races++
			continue
		}
		if err != nil {
			return purged, err
		}
		purged += count
		if last == nil { // it found nothing more
			return purged, nil
		}
		from, races = last, 0
		rest.After(ctx, took)
	}
}

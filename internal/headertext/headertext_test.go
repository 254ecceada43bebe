package headertext

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestEveryByteComesBack(t *testing.T) {
	t.Parallel()
	every := make([]byte, 256)
	for i := range every {
		every[i] = byte(i)
	}
	h := http.Header{"X-Every": {string(every), "", "é", "a,b"}, "X-None": {}, "X-\xff": {"odd name"}}
	text, err := Encode(h)
	require.NoError(t, err)
	back, err := Decode(text)
	require.NoError(t, err)
	require.Equal(t, h, back)
}

func TestASCIIStaysReadable(t *testing.T) {
	t.Parallel()
	text, err := Encode(http.Header{"Content-Type": {"application/json"}})
	require.NoError(t, err)
	require.Equal(t, `{"Content-Type":["application/json"]}`, text)
}

func TestCorruptTextIsAnError(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"", "{", `[]`, `{"A":"b"}`, `{"A":["€"]}`, `{"€":[]}`} {
		_, err := Decode(text)
		require.Error(t, err, "%s", text)
		require.NotContains(t, err.Error(), "€", "an error text shows nothing that is stored")
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(`{"Content-Type":["application/json"]}`)
	f.Add(`{"A":["\u00ff",""]}`)
	f.Fuzz(func(t *testing.T, text string) {
		h, err := Decode(text)
		if err != nil {
			return
		}
		again, err := Encode(h)
		require.NoError(t, err)
		back, err := Decode(again)
		require.NoError(t, err)
		require.Equal(t, h, back)
	})
}

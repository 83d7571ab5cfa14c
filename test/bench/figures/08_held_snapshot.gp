# Time of each batch of cleaning, see 08_held_snapshot.sh. Set: data, picture.

set terminal svg size 900,450 font 'sans-serif,14' background rgb 'white'
set output picture
set datafile separator ','
set title 'Cleaning while a snapshot is held open: time of each batch of 50,000'
set xlabel 'batch'
set ylabel 'milliseconds (logarithmic)'
set logscale y
set grid ytics
set key left top
plot data using 1:(strcol(2) eq 'idem' ? $3 : NaN) with linespoints pointtype 7 pointsize 0.5 linewidth 2 linecolor rgb '#1f77b4' title 'idem, its worker', \
	'' using 1:(strcol(2) eq 'hand_written_cleanup_any' ? $3 : NaN) with linespoints pointtype 5 pointsize 0.5 linewidth 2 linecolor rgb '#d95f02' title 'hand-written, DELETE ... ctid = ANY'
